"""The colours of runs are visible on their background, and distinguishable with any colour vision."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from megatron_style.reporting.style import GROUNDS, INKS, RUN_COLOURS

# What each kind of eye makes of linear red, green and blue (Machado, Oliveira & Fernandes 2009, full severity).
EYES = {
    "all cones": np.eye(3),
    "no red": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "no green": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]
    ),
    "no blue": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]]
    ),
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = np.array([0.9505, 1.0, 1.089])


def linear(colour: str) -> np.ndarray:
    parts = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIE L*a*b*, in which a distance of about 2 can just be seen."""
    xyz = XYZ @ np.clip(rgb, 0, 1) / WHITE
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_colours_stand_out_from_their_ground(mode: str) -> None:
    """What WCAG 2 asks: 3:1 for lines, 4.5:1 for text."""
    ground = XYZ[1] @ linear(GROUNDS[mode])
    for colours, least in ((RUN_COLOURS[mode], 3.0), (INKS[mode], 4.5)):
        for colour in colours:
            dark, light = sorted((ground, XYZ[1] @ linear(colour)))
            assert (light + 0.05) / (dark + 0.05) >= least, colour


@pytest.mark.parametrize("eye", EYES)
@pytest.mark.parametrize("mode", ["light", "dark"])
def test_colours_with_the_same_marks_differ_clearly_for_every_eye(mode: str, eye: str) -> None:
    for group in (RUN_COLOURS[mode][:4], RUN_COLOURS[mode][4:]):
        for one, other in combinations(group, 2):
            distance = np.linalg.norm(lab(EYES[eye] @ linear(one)) - lab(EYES[eye] @ linear(other)))
            assert distance >= 25, (one, other)

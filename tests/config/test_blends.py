"""`data.train` as a list of sources and `data.valid` as a mapping: what is read, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_style.base.errors import UserError
from megatron_style.config.run_file import load_run, save_run
from tests.support.runs import tiny_run

STAGES = [{"segment_length": 4, "steps": 3}]
BOOKS = {"path": "data/books/train", "weight": 1}
WEB = {"path": "data/web/train", "weight": 2}
NEWS = {"path": "data/news/train", "epochs": 2}


@pytest.mark.parametrize(("train", "names"), [
    ("data/books/train", ["train"]),
    ([BOOKS], ["books"]),
    ([BOOKS, WEB], ["books", "web"]),
    ([BOOKS | {"name": "novels"}, {"path": "web/part-1.bin", "weight": 0.5}], ["novels", "part-1"]),
    ([{"path": "train", "weight": 1}, BOOKS], ["train", "books"]),
])  # fmt: skip
def test_sources_have_names(train: Any, names: list[str], tmp_path: Path) -> None:
    run = tiny_run(stages=STAGES, data={"train": train})
    assert [source.label for source in run.data.sources] == names
    assert run.data.is_blend == (len(names) > 1)
    save_run(run, tmp_path / "run.yaml")
    assert load_run(tmp_path / "run.yaml") == run


@pytest.mark.parametrize(("train", "words"), [
    ([BOOKS, WEB | {"name": "books"}], "data: train: duplicate name 'books'; give each source a name of its own"),
    ([BOOKS, {"path": "data/books/train.bin", "weight": 2, "name": "web"}],
     "data: train: duplicate path 'data/books/train'; give it once, with the sum"),
    ([BOOKS, NEWS], "data: train: some sources have a weight, others epochs; give all of them the same"),
    ([BOOKS | {"weight": 0}], "data.train.0.weight is 0, but it should be greater than 0"),
    ([NEWS | {"epochs": -1.5}], "data.train.0.epochs is -1.5, but it should be greater than 0"),
    ([BOOKS | {"weigth": 2}], "data.train.0.weigth: unknown key; did you mean 'weight'?"),
    ([{"path": "data/books/train"}], "data.train.0: needs either weight or epochs; it has neither"),
    ([BOOKS | {"epochs": 2}], "data.train.0: needs either weight or epochs; it has both"),
    ([{"weight": 2}], "data.train.0.path: missing; it has no default"),
    ([{"path": "my books/train", "weight": 1}],
     "data.train.0: 'my books' of its path cannot be the name of a source; set name, such as books"),
    ([BOOKS | {"name": "a/b"}], "data.train.0.name is \"a/b\", but it should be of letters, digits"),
    (["data/books/train"], "data.train.0 is \"data/books/train\", but it should be an object"),
    ([], "data.train is [], but Tuple should have at least 1 item"),
    ({"path": "x"}, "data.train is a section, but it should be a valid string"),
])  # fmt: skip
def test_a_wrong_blend_is_refused_by_name(train: Any, words: str) -> None:
    with pytest.raises(UserError) as refusal:
        tiny_run(stages=STAGES, data={"train": train})
    assert words in str(refusal.value)


def test_a_stage_of_a_blend_has_no_epochs() -> None:
    stages = [*STAGES, {"segment_length": 8, "epochs": 2}]
    with pytest.raises(UserError, match=r"stages.1.epochs is 2, but data.train is a blend, .* give steps or tokens"):
        tiny_run(stages=stages, data={"train": [BOOKS, WEB]})
    assert tiny_run(stages=stages, data={"train": [BOOKS]}).stages[1].epochs == 2


def test_held_out_texts_have_names_and_an_order() -> None:
    texts = {"web": "data/web/valid", "books": "data/books/valid"}
    run = tiny_run(data={"valid": texts})
    assert list(run.data.held_out.items()) == [(name, Path(path)) for name, path in texts.items()]
    assert tiny_run().data.held_out == {"": Path("valid")}


@pytest.mark.parametrize(("valid", "words"), [
    ({}, "data.valid is a section, but Dictionary should have at least 1 item"),
    ({"a b": "data/valid"}, "but it should be of letters, digits"),
    ({"books": 3}, "data.valid.books is 3, but it should be a valid string"),
])  # fmt: skip
def test_wrong_held_out_texts_are_refused(valid: Any, words: str) -> None:
    with pytest.raises(UserError) as refusal:
        tiny_run(data={"valid": valid})
    assert words in str(refusal.value)

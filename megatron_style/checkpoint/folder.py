"""The folder of a run's checkpoints: how one gets its name, and which ones are kept."""

from __future__ import annotations

import shutil
from pathlib import Path

from megatron_style.base.files import atomic_file, sync
from megatron_style.base.run_folder import RunFolder, step_of
from megatron_style.checkpoint.manifest import FILE, Manifest
from megatron_style.config.run import OutputConfig

_ASIDE = ".partial"
_REMOVED = ".removed"
_ABANDONED = ".abandoned"


class CheckpointFolder:
    def __init__(self, output: OutputConfig) -> None:
        self._output = output
        self._run_folder = RunFolder(output.path)
        self.path = self._run_folder.checkpoints
        self.damaged: set[int] = set()  # steps whose checkpoints were skipped, and not written again since

    def steps(self) -> list[int]:
        return self._run_folder.steps()

    def checkpoint(self, step: int) -> Path:
        return self._run_folder.checkpoint(step)

    def aside(self, step: int) -> Path:
        """Return where a checkpoint is written before it gets its name."""
        folder = self.checkpoint(step)
        return folder.with_name(folder.name + _ASIDE)

    def what_stays(self) -> str:
        """Name the checkpoint from which the run can resume."""
        steps = self.steps()
        return f"the checkpoint of step {steps[-1]} is unchanged" if steps else "no checkpoint has been written before"

    def publish(self, manifest: Manifest) -> None:
        """Give a checkpoint whose files are complete its manifest and its name, and remove old ones."""
        folder = self.checkpoint(manifest.step)
        aside = self.aside(manifest.step)
        manifest.write(aside)
        sync(aside / FILE)
        sync(aside)
        if folder.exists():  # the run was reset to an earlier step by hand
            _remove(folder)
        aside.rename(folder)
        self._point_to(folder.name)
        self._prune(manifest)

    def begin(self, step: int) -> None:
        """Make the folder in which a checkpoint is written before it gets its name."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.sweep()
        self.aside(step).mkdir()

    def sweep(self) -> None:
        """Remove what interrupted saves have left. Not to be called during a save, whose files it would remove."""
        for path in self.path.iterdir():
            if path.suffix in (_ASIDE, _REMOVED) and step_of(path.stem) is not None:
                shutil.rmtree(path)

    def _point_to(self, name: str) -> None:
        with atomic_file(self._run_folder.latest) as new:
            new.write_text(name, encoding="utf-8")
            sync(new)
        sync(self.path)

    def abandon_after(self, step: int) -> list[str]:
        """Set the checkpoints of later steps aside, under names that no run resumes from, and return these."""
        names = []
        for later in [found for found in self.steps() if found > step]:
            folder = self.checkpoint(later)
            aside = folder.with_name(folder.name + _ABANDONED)
            if aside.exists():
                shutil.rmtree(aside)
            folder.rename(aside)
            names.append(aside.name)
        if names:
            self._point_to(self.checkpoint(step).name)
        return names

    def _prune(self, manifest: Manifest) -> None:
        """Remove old checkpoints. The newest few are kept, every n-th for good, the best one, and the newest whose
        model is known to be sound: the held-out loss was finite then or later. Damaged ones do not count, so the one
        just written is always kept; they are removed when a newer one is complete."""
        written = manifest.step
        self.damaged.discard(written)
        for step in sorted(step for step in self.damaged & {*self.steps()} if step < written):
            _remove(self.checkpoint(step))
        forever = self._output.keep_every
        steps = [step for step in self.steps() if step not in self.damaged]
        kept = {max((step for step in steps if step <= manifest.sound), default=None)}
        if self._output.keep_best and manifest.best is not None:
            kept.add(manifest.best.step)
        for step in steps[: -self._output.keep_last]:
            if step not in kept and (forever is None or step % forever):
                _remove(self.checkpoint(step))


def _remove(folder: Path) -> None:
    removed = folder.with_name(folder.name + _REMOVED)
    folder.rename(removed)  # a checkpoint that is half removed must not look complete
    shutil.rmtree(removed)

"""Weights & Biases: online where somebody is logged in, else offline in the run folder. Never asks, never prints."""

from __future__ import annotations

import json
import netrc
import os
import re
import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from glmexp.config.registry import register
from glmexp.config.schema import Named
from glmexp.tracker.base import RunInfo, Status

STEP = "step"
IDENTITY_FILE = "tracker.json"
INIT_TIMEOUT_S = 30
FINISH_TIMEOUT_S = 120
MODES = {"online": "online", "run": "online", "shared": "online", "offline": "offline", "dryrun": "offline"}
"""WANDB_MODE's words -> ours; disabled is handled before."""
HOW_TO_LOG_IN = "`wandb login` or WANDB_API_KEY puts the next one online, tracker.mode=offline says that it is meant"


@register("tracker", "wandb")
@dataclass
class Wandb(Named):
    """One run of a wandb project."""

    project: str
    """Project that the run appears in."""
    group: str | None
    """Group of runs. Null: the sweep, where there is one."""
    tags: list[str]
    """Tags of the run."""
    mode: Literal["online", "offline", "disabled"] | None
    """Null: WANDB_MODE where it is set, else online where somebody is logged in, else offline."""
    artifact: bool
    """Keep what was trained as an artifact of the run, once it is proven: uploaded, or with `wandb sync` later."""

    def build(self) -> WandbTracker:
        """A tracker with these settings, not started."""
        return WandbTracker(self)


class WandbTracker:
    """One wandb run. A resumed run keeps its id, which lies in the run folder."""

    def __init__(self, settings: Wandb) -> None:
        self._settings = settings
        self._run: Any = None
        self._name = ""
        self._online = False
        self._identity: dict[str, Any] = {}
        self._identity_path = Path()
        self._logged_before = -1
        """Steps up to here were tracked before a resume; wandb keeps what it was told first."""

    def start(self, info: RunInfo) -> list[str]:
        """Open the run; says so where it is offline though nobody asked for that, or is not opened at all."""
        self._name = info.name
        asked = self._settings.mode or os.environ.get("WANDB_MODE") or None
        if asked == "disabled":
            by = "tracker.mode" if self._settings.mode else "WANDB_MODE"
            return [f"wandb: {by}=disabled, the run is not tracked"]
        if asked is not None and asked not in MODES:
            raise ValueError(f"WANDB_MODE={asked} is unknown: online, offline or disabled")
        lines = self._load_identity(info.folder / IDENTITY_FILE)
        mode = self._mode(asked, lines)
        if mode == "online":
            self._run = self._open_online(info, lines)
        if self._run is None:
            self._run = self._init(info, "offline")
        # The optimizer step is the axis of every chart; wandb's own counter counts calls of log.
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)
        return lines

    def mode(self) -> tuple[str, list[str]]:
        """What a run would be now, online, offline or disabled, and what is to be said about it."""
        lines: list[str] = []
        asked = self._settings.mode or os.environ.get("WANDB_MODE") or None
        return (asked, lines) if asked == "disabled" else (self._mode(asked, lines), lines)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of an optimizer step; steps that were tracked before a resume are not tracked again."""
        self._log(step, metrics)

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """A wandb table with the step in front; the rows have the same keys in the same order."""
        if self._run is None or not rows:
            return
        import wandb

        # A column of its own: tables of several steps that are put together in the browser keep it.
        columns: list[str | int] = [STEP, *rows[0]]
        data = [[step, *row.values()] for row in rows]
        self._log(step, {name: wandb.Table(columns=columns, data=data)})

    def summary(self, values: Mapping[str, Any]) -> None:
        """Values beside the run's name in wandb's list of runs."""
        if self._run is not None:
            self._run.summary.update(dict(values))

    def artifact(self, folder: Path) -> None:
        """A wandb artifact of type model, with tracker.artifact. Its files are named and not copied (immutable)."""
        if self._run is None or not self._settings.artifact:
            return
        import wandb

        name = re.sub(r"[^\w.-]+", "-", self._name).strip("-")
        kept = wandb.Artifact(f"{name}-{self._identity['id']}", type="model", metadata={"folder": folder.name})
        kept.add_dir(str(folder), policy="immutable", skip_cache=True)
        self._run.log_artifact(kept)

    def finish(self, status: Status) -> list[str]:
        """Close the run; how to read it here and how to upload it."""
        if self._run is None:
            return []
        run, self._run = self._run, None
        folder = Path(run.settings.sync_dir)
        url = run.url if self._online else None
        run.finish(exit_code=1 if status == "failed" else 0)
        place = shlex.quote(str(folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder))
        lines = [f"read the metrics here: wandb leet run {place}"]
        return [*lines, f"or there: {url}"] if url else [*lines, f"upload them: wandb sync {place}"]

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        if self._run is None or step <= self._logged_before:
            return
        self._run.log({STEP: step, **values})
        if step != self._identity["last_step"]:
            self._identity["last_step"] = step
            self._save_identity()

    def _load_identity(self, path: Path) -> list[str]:
        self._identity_path = path
        if not path.exists():
            self._identity = {"tracker": "wandb", "id": secrets.token_hex(4), "last_step": -1}
            self._save_identity()
            return []
        self._identity = json.loads(path.read_text(encoding="utf-8"))
        self._logged_before = self._identity["last_step"]
        resumed = f"wandb: the run goes on under its id {self._identity['id']}"
        return [f"{resumed}; steps up to {self._logged_before} are there already and are not tracked again"]

    def _save_identity(self) -> None:
        temporary = self._identity_path.with_name(f".{self._identity_path.name}.new")
        temporary.write_text(json.dumps(self._identity) + "\n", encoding="utf-8")
        temporary.replace(self._identity_path)

    def _mode(self, asked: str | None, lines: list[str]) -> str:
        """online or offline. wandb asks for a key on a terminal if it goes online without one, so it never does."""
        system = self._set_up()
        mode = MODES[asked] if asked else None
        if mode == "offline" or _logged_in(system):
            return mode or "online"
        request = f"{'tracker.mode' if self._settings.mode else 'WANDB_MODE'}={asked}, but " if asked else ""
        lines.append(f"wandb: {request}the run is offline since nobody is logged in; {HOW_TO_LOG_IN}")
        return "offline"

    def _set_up(self) -> Any:
        """wandb's settings for the process: silent from the start, and offline so that it sends no telemetry."""
        import wandb

        if os.environ.get("WANDB_MODE") == "":
            del os.environ["WANDB_MODE"]  # unset is what is meant; wandb refuses an empty one
        return wandb.setup(settings=wandb.Settings(silent=True, mode="offline")).settings

    def _open_online(self, info: RunInfo, lines: list[str]) -> Any:
        """The run, or None where the server cannot be reached or refuses: training does not depend on it."""
        import wandb

        try:
            run = self._init(info, "online")
        except wandb.Error as error:
            reason = str(error).strip().split("\n")[0]
            lines.append(f"wandb: cannot go online ({type(error).__name__}: {reason}), the run is offline")
            # wandb's service still holds the run's id for the attempt; with the service the attempt ends.
            wandb.teardown()
            self._set_up()
            return None
        self._online = True
        return run

    def _init(self, info: RunInfo, mode: Literal["online", "offline"]) -> Any:
        import wandb

        folder = Path(os.environ.get("WANDB_DIR") or info.folder).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        return wandb.init(
            project=self._settings.project,
            name=info.name,
            group=self._settings.group or info.group,
            job_type=info.job_type,
            tags=list(dict.fromkeys([*self._settings.tags, *info.tags])),
            config=info.config,
            id=self._identity["id"],
            resume="allow",
            mode=mode,
            dir=folder,
            settings=wandb.Settings(
                silent=True,
                console="off",
                save_code=False,
                disable_code=True,
                disable_git=True,
                init_timeout=INIT_TIMEOUT_S,
                finish_timeout=FINISH_TIMEOUT_S,
            ),
        )


def _logged_in(system: Any) -> bool:
    """Whether wandb will find a key or an identity token: environment, its settings file, netrc."""
    if any(os.environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")):
        return True
    if system.api_key or system.identity_token_file:
        return True
    host = urlsplit(system.base_url).netloc
    places = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    for path in (Path(place).expanduser() for place in places):
        if path.is_file():
            try:
                entry = netrc.netrc(path).authenticators(host)
            except (netrc.NetrcParseError, OSError):
                return False  # wandb cannot read it either
            return bool(entry and entry[2])
    return False

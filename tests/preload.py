"""What the server of forked ranks and commands imports once (see ``tests/ranks.py``): all that a run would."""

import gc
import os

from glmexp.launcher.environment import set_defaults

GIVEN = dict(os.environ)
set_defaults()  # as a rank does before libraries read these variables
DEFAULTS = {name: value for name, value in os.environ.items() if name not in GIVEN}

import peft  # noqa: E402, F401
import torch._dynamo  # noqa: E402, F401 - what an optimizer's first step imports

import glmexp.entry.train  # noqa: E402
import glmexp.method.lora  # noqa: E402, F401
import tests.engine.cells  # noqa: E402, F401
from glmexp.config.compose import run_config  # noqa: E402
from glmexp.launcher.ranks import gpu_count  # noqa: E402

if gpu_count() == 0:  # else it might touch one, which no fork could use any more
    import deepspeed  # noqa: F401

run_config([])  # its files and Hydra's plugins
gc.freeze()  # forks share what is not touched

"""`python -m tests.launched MODULE ARGUMENTS` is `python -m MODULE ARGUMENTS`, for which lm-eval's task files are read
already: see `tests.once`."""

import runpy
import sys

from tests import once

once.install()
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)

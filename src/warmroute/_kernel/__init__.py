"""The compiled part: one extension module, `_native`, whose names are imported from here.

`kernel.h` lists the parts, `constants.h` the constants that C and Python share. Each `.pyi` file describes what Python
sees of the C file of the same name.
"""

from warmroute._kernel._native import *  # noqa: F403

"""Lets the tests here import what they share, however pytest was started."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "sim_server")]

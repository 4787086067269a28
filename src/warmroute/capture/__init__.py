"""Captures of live traffic: traces in Mooncake's format with hashes instead of text, for `replay` and `plan`.

trace_row.py        one line of a capture; replay reads the same
pseudonyms.py       the capture's key, and the ids that it makes of blocks, tenants and sessions
conversation.py     which earlier prompt a prompt continues
capture_run.py      one capture: turns finished requests into lines
capture.py          what is captured now: to files, to the admin API
capture_files.py    rotating files, bounded on disk
"""

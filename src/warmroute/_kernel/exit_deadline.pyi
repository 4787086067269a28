def set_exit_deadline(seconds: int, /) -> None:
    """Set the time between a signal and the end of the process; 0: the process is not ended."""

def exit_after_signal(signal: int, /) -> None:
    """Start the exit deadline when this signal arrives, and then call the handler that Python has installed.

    To be called again after each change of the signal's handler. Raises OSError."""

"""LoRA adapters on the GPU: at most `slots` in one batch. Loading another one evicts the least recently used."""


class LoraSlots:
    __slots__ = ("_resident", "_running", "load_ms", "slots")

    def __init__(self, slots: int, load_ms: float) -> None:
        self.slots = slots
        self.load_ms = load_ms
        self._resident: dict[str, None] = {}  # least recently used first
        self._running: dict[str, int] = {}  # adapter → requests in the batch

    @property
    def running(self) -> list[str]:
        return list(self._running)

    def admits(self, name: str | None) -> bool:
        return name is None or name in self._running or len(self._running) < self.slots

    def add_request(self, name: str | None) -> float:
        """Count a request that joins the batch. Return the time (ms) to load its adapter."""
        if name is None:
            return 0.0
        self._running[name] = self._running.get(name, 0) + 1
        if name in self._resident:
            del self._resident[name]
            self._resident[name] = None
            return 0.0
        if len(self._resident) >= self.slots:
            del self._resident[next(other for other in self._resident if other not in self._running)]
        self._resident[name] = None
        return self.load_ms

    def remove_request(self, name: str | None) -> None:
        if name is None:
            return
        count = self._running[name] - 1
        if count:
            self._running[name] = count
        else:
            del self._running[name]

"""What is behind a name, as `IngressMetrics` asks for it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Behind:
    engines: int = 1
    sleeps: bool = False
    engines_wanted: int = 1
    most_answers: int = 8

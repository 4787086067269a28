"""Text from a seeded random generator: sentences, code, JSON and several scripts.

The small tokenizers are trained on it (make_models.py) and the chats consist of it (make_chats.py). The repository
contains no text of anybody else.
"""

from __future__ import annotations

import json
from random import Random

from warmroute.lab.engine.tokenizers import WORDS

SYLLABLE_TEXT = "ba ce di fo gu ha je ki lo mu na pe qui ro su ta ve wi xo yu za ster ing tion ment ness able pre con"
SYLLABLES = SYLLABLE_TEXT.split()
NAME_TEXT = "value count index path node items result error request reply total start limit queue block token"
NAMES = NAME_TEXT.split()
OTHER_SCRIPTS = (
    "Größe, Maß und Übergänge: naïve Fälle, déjà vu, señor, smørrebrød.",
    "Λέξεις σε άλλη γραφή, με τόνους.",
    "Слова другого письма, без перевода строки.",
    "短い文です。長い文ではありません。",
    "这是一句话，那是另一句话。",
    "한 문장과 또 한 문장.",
    "جملة قصيرة، ثم جملة أخرى.",
    "🙂👍🏽 👩‍👩‍👧 🇨🇭 ✈️ e\u0301 o\u0308 ﬁ ½ x² → ≤ ∑",
)


class TextGenerator:
    """Generates the same texts in the same order for the same seed."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)

    def word(self) -> str:
        if self.random.random() < 0.12:
            return "".join(self.random.choices(SYLLABLES, k=self.random.randint(2, 4)))
        return WORDS[int(len(WORDS) * self.random.random() ** 2)]

    def sentence(self) -> str:
        words = [self.word() for _ in range(self.random.randint(4, 14))]
        if self.random.random() < 0.3:
            words.insert(2, str(self.random.randint(0, 10 ** self.random.randint(1, 6))))
        if self.random.random() < 0.3:
            words[1] += ","
        return " ".join(words).capitalize() + self.random.choice(".....?!:")

    def paragraph(self, sentences: int = 3) -> str:
        return " ".join(self.sentence() for _ in range(sentences))

    def other_script(self) -> str:
        return self.random.choice(OTHER_SCRIPTS)

    def code(self) -> str:
        first, second, third = self.random.sample(NAMES, 3)
        number = self.random.randint(0, 999)
        return (
            f"def {first}_{second}({second}: int, {third}: str = '') -> list[str]:\n"
            f'    """{self.sentence()}"""\n'
            f"    if {second} > {number}:\n"
            f"        raise ValueError(f'{{{second}}} is not {third}')\n"
            f"\n"
            f"    return [{third} for {first} in range({second})]  # {self.word()}\n"
        )

    def fields(self) -> dict[str, object]:
        """Return the fields of a JSON object."""
        values = (
            self.word(),
            self.random.randint(-99, 9999),
            round(self.random.random(), 3),
            None,
            True,
            [self.word()],
        )
        return {name: self.random.choice(values) for name in self.random.sample(NAMES, self.random.randint(1, 4))}

    def long_word(self, characters: int) -> str:
        return "".join(self.random.choices(SYLLABLES, k=characters))[:characters]

    def training_text(self) -> str:
        """Return one text of the kind that a conversation contains."""
        kind = self.random.random()
        if kind < 0.6:
            return self.paragraph()
        if kind < 0.75:
            return self.code()
        if kind < 0.9:
            return json.dumps(self.fields(), indent=self.random.choice([None, 2]))
        return self.other_script()

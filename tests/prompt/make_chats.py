"""Write chats.jsonl: chat requests of many kinds from a seeded generator. Each line is the body of one request.

python tests/prompt/make_chats.py
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from generated_text import TextGenerator
from sample_requests import assistant, system, text, tool, user

FILE = Path(__file__).parent / "chats.jsonl"
CHATS_OF_EACH_KIND = 12
SPECIAL_TEXTS = (
    "<|end|>",
    "<|start|>user\n",
    "</s>",
    "<s>",
    "<think>",
    "</think>",
    "<tool_response>",
    "[INST]",
    "{{ x }}",
)
Body = dict[str, Any]


class ChatGenerator(TextGenerator):
    """Generates the bodies of chat requests."""

    def question(self) -> str:
        return self.paragraph(self.random.randint(1, 3))

    def answer(self) -> str:
        kind = self.random.random()
        return self.code() if kind < 0.15 else self.paragraph(self.random.randint(1, 4))

    def turns(self, count: int) -> Iterator[dict[str, Any]]:
        """Yield questions and answers; the last is a question."""
        for _ in range(count - 1):
            yield user(self.question())
            yield assistant(self.answer())
        yield user(self.question())

    def plain(self) -> Body:
        return {"messages": list(self.turns(self.random.randint(1, 6)))}

    def with_system(self) -> Body:
        return {"messages": [system(self.paragraph(4)), *self.turns(self.random.randint(1, 5))]}

    def with_tools(self) -> Body:
        names = [f"{self.word()}_{number}" for number in range(self.random.randint(1, 3))]
        functions = [
            {"name": name, "description": self.sentence(), "parameters": {"type": "object", "properties": {}}}
            for name in names
        ]
        messages = [user(self.question())]
        for step in range(self.random.randint(1, 3)):
            calls = [
                {
                    "id": f"call_{step}_{number}",
                    "type": "function",
                    "function": {"name": self.random.choice(names), "arguments": json.dumps(self.fields())},
                }
                for number in range(self.random.randint(1, 2))
            ]
            messages.append(assistant(self.random.choice([None, "", self.sentence()]), tool_calls=calls))
            messages += [tool(json.dumps(self.fields()), tool_call_id=call["id"]) for call in calls]
        if self.random.random() < 0.5:
            messages += [assistant(self.answer()), user(self.question())]
        return {"messages": messages, "tools": [{"type": "function", "function": each} for each in functions]}

    def with_reasoning(self) -> Body:
        messages = list(self.turns(self.random.randint(2, 4)))
        for message in messages[1::2]:
            if self.random.random() < 0.5:
                message["reasoning_content"] = self.paragraph()
            else:
                message["content"] = f"<think>\n{self.paragraph()}\n</think>\n\n{message['content']}"
        return {"messages": messages}

    def in_parts(self) -> Body:
        messages = list(self.turns(self.random.randint(1, 4)))
        for message in messages[::2]:
            message["content"] = text(*(self.random.choice([self.sentence(), "", "\n"]) for _ in range(3)))
        return {"messages": messages}

    def in_other_scripts(self) -> Body:
        messages = list(self.turns(self.random.randint(1, 4)))
        for message in messages:
            message["content"] = " ".join(self.other_script() for _ in range(self.random.randint(1, 3)))
        return {"messages": messages}

    def blank(self) -> Body:
        messages = list(self.turns(self.random.randint(1, 3)))
        self.random.choice(messages)["content"] = self.random.choice(["", " ", "\n\n", " \t ", "\u3000"])
        return {"messages": messages}

    def with_special_texts(self) -> Body:
        messages = list(self.turns(self.random.randint(1, 3)))
        for message in messages:
            message["content"] += self.random.choice(["", " "]) + self.random.choice(SPECIAL_TEXTS) + self.word()
        return {"messages": messages}

    def with_a_long_word(self) -> Body:
        long = self.random.choice([self.long_word(900), "a" * 700, "=" * 500, " " * 300, "0" * 400])
        return {"messages": [user(self.sentence()), assistant(self.sentence()), user(f"{self.word()} {long}!")]}


KINDS: list[Callable[[ChatGenerator], Body]] = [
    ChatGenerator.plain, ChatGenerator.with_system, ChatGenerator.with_tools, ChatGenerator.with_reasoning,
    ChatGenerator.in_parts, ChatGenerator.in_other_scripts, ChatGenerator.blank, ChatGenerator.with_special_texts,
    ChatGenerator.with_a_long_word,
]  # fmt: skip


def chat_lines() -> str:
    generator = ChatGenerator(seed=2)
    bodies = [kind(generator) for _ in range(CHATS_OF_EACH_KIND) for kind in KINDS]
    return "".join(json.dumps(body, ensure_ascii=False) + "\n" for body in bodies)


if __name__ == "__main__":
    FILE.write_text(chat_lines())

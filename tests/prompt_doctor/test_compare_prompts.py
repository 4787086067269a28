"""Where prompts differ before common text, and what differs there."""

from __future__ import annotations

import json
from random import Random

import pytest
from prompt_examples import SYSTEM, TOOLS, Examples, compared, masked

from warmroute.app.prompt_doctor.samples import common_prefix, hide, volatile_spans

COUNT = 24


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Now: 2026-11-16T04:48:32.123Z.", [("2026-11-16T04:48:32.123Z", "time")]),
        ("It is Monday, November 16, 2026 at 4:48 PM", [("Monday, November 16, 2026 at 4:48 PM", "time")]),
        ("sent 16 Nov 2026 04:48:32 GMT", [("16 Nov 2026 04:48:32 GMT", "time")]),
        ("since 1763268512 or 1763268512123", [("1763268512", "time"), ("1763268512123", "time")]),
        ("id 550e8400-e29b-41d4-a716-446655440000", [("550e8400-e29b-41d4-a716-446655440000", "id")]),
        ("req_8f3kd92jd9 of user 17", [("req_8f3kd92jd9", "id"), ("17", "number")]),
        ("may we march on, says nobody", []),
    ],
)
def test_volatile_text_is_found_by_its_form(text: str, expected: list[tuple[str, str]]) -> None:
    assert [(text[span.start : span.end], span.kind) for span in volatile_spans(text)] == expected


def test_a_long_text_is_searched_in_pieces_without_losing_any() -> None:
    text = " ".join(f"word {number}" for number in range(3000))
    assert len(list(volatile_spans(text))) == 3000


def test_prompts_that_differ_at_the_user_message_are_healthy() -> None:
    examples = Examples()
    for tools in (None, TOOLS):
        found = compared([examples.chat(tools=tools, turns=1 + number % 3) for number in range(COUNT)])
        assert not found.places
        prompt = masked(examples.chat(tools=tools))
        assert {prompt.position(at).part.role for at in found.shared} <= {"user", "", "system"}


def test_user_messages_that_repeat_a_question_with_other_numbers_are_healthy() -> None:
    bodies = [
        json.dumps({"messages": [{"role": "user", "content": f"What is {number} times 7? Explain."}]}).encode()
        for number in range(COUNT)
    ]
    assert not compared(bodies).places


def test_a_difference_that_has_just_begun_is_seen_in_four_prompts() -> None:
    examples = Examples()
    healthy = [examples.chat() for _ in range(60)]
    stamped = [examples.chat(f"Current time: {examples.stamp()}\n{SYSTEM}") for _ in range(4)]
    assert [place.kind for place in compared([*healthy, *stamped]).places] == ["time"]
    assert not compared([*stamped, *healthy]).places, "a few of many are no finding"


def test_a_time_in_front_of_the_system_prompt_is_named_with_its_position() -> None:
    examples = Examples()
    [place] = compared([examples.chat(f"Current time: {examples.stamp()}\n{SYSTEM}") for _ in range(COUNT)]).places
    assert place.kind == "time" and len(place.prompts) == COUNT and place.values > COUNT / 2
    assert (place.position.part.role, place.position.part.number, place.position.character) == ("system", 0, 14)
    # without the time, everything up to the question could be reused
    assert all(characters >= len(SYSTEM) for characters in place.prompts.values())


def test_a_time_at_the_end_of_the_system_prompt_costs_the_history_of_conversations() -> None:
    examples = Examples()
    bodies = [examples.chat(f"{SYSTEM}\nCurrent time: {examples.stamp()}", turns=3) for _ in range(COUNT)]
    [place] = compared(bodies).places
    assert place.kind == "time"
    assert min(place.prompts.values()) > len(SYSTEM) + 500


def test_an_id_inside_a_tool_is_named_with_the_tool() -> None:
    examples = Examples()
    bodies = []
    for _ in range(COUNT):
        tools = json.loads(json.dumps(TOOLS))
        tools[1]["function"]["description"] += f" Trace {examples.uuid()}."
        bodies.append(examples.chat(tools=tools))
    [place] = compared(bodies).places
    assert (place.kind, place.position.part.kind, place.position.part.number) == ("id", "tool", 1)
    text = place.position.part.text
    assert text[:].index("Trace") + len("Trace ") == place.position.character


def test_a_counter_is_a_number() -> None:
    examples = Examples()
    [place] = compared([examples.chat(f"Request {1000 + number}.\n{SYSTEM}") for number in range(COUNT)]).places
    assert place.kind == "number"


def test_tools_in_another_order_are_the_same_tools() -> None:
    examples = Examples()
    [place] = compared([examples.chat(tools=examples.shuffled(TOOLS)) for _ in range(COUNT)]).places
    assert (place.kind, place.position.part.kind) == ("order", "tool") and len(place.prompts) == COUNT


def test_documents_in_another_order_are_the_same_documents() -> None:
    examples = Examples()
    documents = [f"Document {letter}: {examples.question(60)}" for letter in "ABCDE"]
    bodies = [examples.chat("Use these.\n" + "\n".join(examples.shuffled(documents))) for _ in range(COUNT)]
    [place] = compared(bodies).places
    assert place.kind == "order" and place.position.part.kind == "message"


def test_other_text_before_common_text_is_named() -> None:
    examples = Examples()
    names = [f"{first} {last}" for first in ("Ann", "Bo", "Cy", "Di", "Ed") for last in ("Ash", "Birch", "Elm", "Fir")]
    bodies = [examples.chat(f"The customer is {name}.\n{SYSTEM}") for name in names]
    [place] = compared(bodies).places
    assert place.kind == "text" and place.position.part.role == "system"
    assert 16 <= place.position.character <= 22


def test_a_client_that_drops_the_oldest_messages_is_named() -> None:
    examples = Examples()
    bodies = []
    for _ in range(6):
        history = [{"role": "user", "content": examples.question(40)}]
        for _turn in range(8):
            window = [{"role": "system", "content": "Be kind."}, *history[-5:]]
            bodies.append(json.dumps({"messages": window}).encode())
            history += [
                {"role": "assistant", "content": examples.question(60)},
                {"role": "user", "content": examples.question(40)},
            ]
    kinds = [place.kind for place in compared(bodies).places]
    assert kinds == ["history"]


def test_one_of_two_applications_is_named() -> None:
    examples = Examples()
    bank = SYSTEM.replace("shop", "bank")
    bodies = [examples.chat() for _ in range(COUNT)]
    bodies += [examples.chat(f"It is {examples.stamp()}. {bank}") for _ in range(COUNT)]
    [place] = compared(bodies).places
    assert sorted(place.prompts) == list(range(COUNT, 2 * COUNT))


def test_the_same_difference_in_many_applications_is_one_place() -> None:
    examples = Examples()
    systems = [SYSTEM.replace("shop", f"{word} shop") for word in ("first", "second", "third", "fourth", "fifth")]
    bodies = [examples.chat(f"Time: {examples.stamp()}\n{system}") for system in systems for _ in range(3)]
    [place] = compared(bodies).places
    assert len(place.prompts) == len(bodies) and place.position.character == 6
    bodies = []
    for number in range(15):
        tools = json.loads(json.dumps(TOOLS))
        tools[0]["function"]["description"] = f"Shop {number % 5}. Trace {examples.uuid()}. " + "Finds things. " * 9
        bodies.append(examples.chat(systems[number % 5] + "!" * (number % 5), tools=tools))
    [place] = compared(bodies).places
    assert (place.kind, len(place.prompts), place.values) == ("id", 15, 15)


def test_a_position_leads_back_to_the_character_as_sent() -> None:
    random = Random(3)
    for _ in range(50):
        words = [random.choice(("word", "2026-11-16", "17", "a1b2c3d4e5", "é")) for _ in range(40)]
        text = " ".join(words)
        prompt = masked(json.dumps({"messages": [{"role": "user", "content": text}]}).encode())
        part = prompt.parts[0]
        for at, character in enumerate(part.text):
            position = prompt.position(part.start + at)
            if character.isalpha() and character.isascii():
                assert text[position.character] == character
        assert prompt.raw_characters(part.start + len(part.text)) == len(text)


def test_the_common_prefix_is_that_of_a_plain_loop() -> None:
    random = Random(5)
    for _ in range(300):
        one = "".join(random.choices("ab", k=random.randrange(400)))
        other = one[: random.randrange(len(one) + 1)] + "".join(random.choices("ab", k=random.randrange(5)))
        expected = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
        assert common_prefix(one, other) == (min(len(one), len(other)) if expected is None else expected)


def test_hidden_text_keeps_its_form_only() -> None:
    assert hide("Ann's id: 4711, 2026-11-16\n") == "xxx'x xx: 0000, 0000-00-00\n"

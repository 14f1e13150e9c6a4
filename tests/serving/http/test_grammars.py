"""Whatever tokens a grammar lets through, the text is of its language."""

import json
import re
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch
from call_texts import CALL_TEXTS
from tokenizers import AddedToken

from moe_runtime.checkpoints.opening import load_tokenizer
from moe_runtime.models.pocket import pocket_path
from moe_runtime.serving.http.answer_text import REASONING_MARKS, AnswerSections, Vocabulary
from moe_runtime.serving.http.api_errors import FieldError
from moe_runtime.serving.http.grammars import (
    GrammarConstraint,
    Grammars,
    after_reasoning,
    of_response_format,
    of_tools,
    regex_of,
)
from moe_runtime.serving.http.schema import Function
from moe_runtime.serving.http.tool_formats import TOOL_FORMATS, ParsedCall
from moe_runtime.serving.requests import ConstraintError

THINK = REASONING_MARKS[0]
SIZE = {"type": "object", "properties": {"size": {"enum": [1, 2]}}, "required": ["size"]}
CITY = Function(name="city", parameters={**SIZE, "additionalProperties": False})
WEATHER = Function(
    name="weather",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"$ref": "#/$defs/Days"}},
        "required": ["city", "days"],
        "$defs": {"Days": {"enum": [1, 2]}},
    },
)
FORMATS = {how.name: how for how in TOOL_FORMATS}


@pytest.fixture(scope="module")
def grammars(tokenizer: Any) -> Grammars:
    return Grammars(Vocabulary(tokenizer, 4100, [0]))


def drawn(grammars: Grammars, tokenizer: Any, grammar: str, seed: int) -> str | None:
    """A text that a model without any preference writes; None where it finds no end."""
    constraint = grammars.constraint(grammars.compile(grammar, "it"))
    rng, ids = Random(seed), []
    for _ in range(300):
        mask = constraint.allowed(ids)
        assert mask is not None
        assert mask.shape == (4100,)
        allowed = mask.nonzero().flatten().tolist()
        assert allowed
        assert max(allowed) < 4096
        if 0 in allowed:
            return tokenizer.decode(ids)
        ids.append(rng.choice(allowed))
    return None


def texts(grammars: Grammars, tokenizer: Any, grammar: str) -> list[str]:
    found = [drawn(grammars, tokenizer, grammar, seed) for seed in range(3)]
    ended = [text for text in found if text is not None]
    assert ended
    return ended


@pytest.mark.parametrize(
    ("asked", "is_right"),
    [
        ({"type": "json_object"}, lambda text: isinstance(json.loads(text), dict)),
        (
            {"type": "json_schema", "json_schema": {"name": "size", "schema": SIZE}},
            lambda text: json.loads(text)["size"] in (1, 2),
        ),
        (
            {"type": "regex", "regex": "[ab]{2}/c"},
            lambda text: text in ("aa/c", "ab/c", "ba/c", "bb/c"),
        ),
        ({"type": "regex", "regex": r"a\/b[/]c\\/"}, lambda text: text == "a/b/c\\/"),
        ({"type": "grammar", "grammar": 'start: "x" | "yy"'}, lambda text: text in ("x", "yy")),
    ],
)
def test_texts_are_of_the_response_format(grammars, tokenizer, asked, is_right):
    grammar = of_response_format(asked)
    assert grammar is not None
    assert all(map(is_right, texts(grammars, tokenizer, grammar)))


@pytest.mark.parametrize("how", TOOL_FORMATS, ids=lambda how: how.name)
def test_required_calls_can_be_read(grammars, tokenizer, how):
    grammar = of_tools([CITY], how, {}, is_needed=True, may_repeat=False)
    assert grammar is not None
    for text in texts(grammars, tokenizer, grammar):
        sections = AnswerSections(None, how, [CITY])
        (call,) = [*sections.add(text), *sections.end()]
        assert isinstance(call, ParsedCall)
        assert call.name == "city"
        assert json.loads(call.arguments)["size"] in (1, 2)


@pytest.mark.parametrize("how", TOOL_FORMATS, ids=lambda how: how.name)
def test_a_text_within_a_call_is_of_its_grammar(grammars, tokenizer, how):
    text = {"type": "string", "pattern": '^(?:[ab]{2}\n(?:"|/)c?)$'}
    tool = Function(name="tool", parameters={"type": "object", "properties": {"input": {}}})
    schema: Any = {"type": "object", "properties": {"input": text}, "required": ["input"]}
    tool.enforce(schema | {"additionalProperties": False}, "it")
    grammar = of_tools([tool], how, {}, is_needed=True, may_repeat=False)
    assert grammar is not None
    for written in texts(grammars, tokenizer, grammar):
        sections = AnswerSections(None, how, [tool])
        (call,) = [*sections.add(written), *sections.end()]
        assert isinstance(call, ParsedCall)
        assert re.fullmatch('[ab]{2}\n["/]c?', json.loads(call.arguments)["input"])


LINES = r"""
start: head (add | drop)+ tail?  // of a change
head: "*** Change \"a\"" LF
!add: "+" /(.*)/ LF -> line
?drop: ["-" | "--"i] NAME{1,2} /[a-c]\/x/i LF
tail: "e" ~ 2..3
    | "f"
NAME: "d".."f" DIGIT*
%import common.LF
%import common.INT -> DIGIT
"""


@pytest.mark.parametrize(
    "text",
    [
        '*** Change "a"\n+\n',
        '*** Change "a"\n+any thing\n-d1f B/X\n',
        '*** Change "a"\n-d1fB/X\nee',
        '*** Change "a"\nea/x\nf',
        '*** Change "a"\n--e7a/x\neee',
        '*** Change "a"\n--g7a/x\n',
        '*** Change "a"\n+\neeee',
        '*** Change "a"\nf',
        "*** Change a\n+\n",
        "",
    ],
)
def test_an_expression_has_the_texts_of_its_grammar(plain, text):
    is_right = re.fullmatch(regex_of(LINES), text) is not None
    assert is_right == writes(plain, LINES, text)
    if is_right:
        asked = {"type": "string", "pattern": f"^(?:{regex_of(LINES)})$"}
        assert writes(plain, f"start: %json {json.dumps(asked)}", json.dumps(text))


LARGE = f'X: "{"x" * 60000}"\nstart: {" | ".join(["X"] * 9)}'
DOUBLED = "start: a0\n" + "".join(f"a{n}: a{n + 1} a{n + 1}\n" for n in range(16)) + 'a16: "bb"'


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ('start: "a" start | "b"', "start is part of itself"),
        ('start: "a" other', "has no other"),
        ('other: "a"', "has no start"),
        ('"a"', "expected NAME:"),
        ('start: ("a" | "b"', r"a \( that nothing closes"),
        ('start: "a")', r"start has a \) too many"),
        ('start: "a"\n%ignore " "', "%ignore .* cannot be enforced"),
        ("start: A & B", "& B' cannot be enforced"),
        ('start: "a" .. b', r"expected a text after"),
        (r'start: "\x"', "cannot be read"),
        ("start: " + "(" * 5000, "cannot be read"),
        (DOUBLED, "too large"),
        (LARGE, "too large"),
        ('start: "ab".."z"', "one character"),
        ('start: "a".."z"i', "one character"),
        ('start: A\nA: "x"\nA: "y"', "A is defined twice"),
        ('start: INT\nINT: "q"\n%import common.INT', "INT is defined and imported"),
        ("start: /a)|(b/", "brackets do not match"),
        ("start: /[(]/ /a[)/", "brackets do not match"),
        ("start: /a#)/x", "flag x"),
        ("start: /(?i-x:a)/ /(?x)#/", "flag x"),
    ],
)
def test_what_is_no_regular_grammar_is_refused(grammar, said):
    with pytest.raises(ValueError, match=said):
        regex_of(grammar)


def test_open_reasoning_is_closed_before_the_answer(grammars, tokenizer):
    grammar = after_reasoning('start: "yes" | "no"', THINK, {}, is_open=True)
    constraint = grammars.constraint(grammars.compile(grammar, "it"))
    thought = tokenizer("I think so </think> y")["input_ids"]
    for end in range(len(thought)):
        mask = constraint.allowed(thought[:end])
        assert mask is not None
        assert mask[thought[end]]
        assert not mask[0]
    free = after_reasoning('start: "yes" | "no"', THINK, {}, is_open=False)
    assert drawn(grammars, tokenizer, free, 0) is not None


@pytest.mark.parametrize(
    "asked",
    [
        {"type": "xml"},
        {"type": "json_schema"},
        {"type": "json_object", "schema": {}},
        {"type": "regex", "regex": "("},
        {"type": "grammar", "grammar": "start: nothing"},
        {"type": "json_schema", "json_schema": {"schema": {"type": "number", "minimum": "x"}}},
    ],
)
def test_formats_that_are_none_are_refused(grammars, asked):
    with pytest.raises(FieldError, match="response_format"):
        grammars.compile(of_response_format(asked) or "", "response_format")


BARE = '{"name": "city", "parameters": {"size": %s}}'


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("hermes", [("only words, <tool_ and so on", True)]),
        (
            "llama-json",
            [
                ("only words {", True),
                (" \n" + BARE % 1, True),
                (BARE % 3, False),
                ('{"size": 3}', False),
                ("words <|python_tag|>" + BARE % 2, True),
                ("words <|python_tag|>" + BARE % 3, False),
            ],
        ),
        ("llama-pythonic", [("a[1]", True), ("[city(size=2)]", True), (" [city(size=3)]", False)]),
    ],
)
def test_calls_in_free_text_keep_to_the_schema(grammars, tokenizer, name, written):
    grammar = of_tools([CITY], FORMATS[name], {}, is_needed=False, may_repeat=True)
    for text, is_right in written:
        constraint = grammars.constraint(grammars.compile(grammar, "it"))
        ids = tokenizer(text)["input_ids"]
        right = [bool(mask[ids[end]]) for end, mask in enumerate(masks_before(constraint, ids))]
        assert (right == [True] * len(ids)) == is_right


def masks_before(constraint: GrammarConstraint, ids: list[int]) -> Iterator[torch.Tensor]:
    """What may come in the place of each token, up to the first that may not."""
    for end, token in enumerate(ids):
        mask = constraint.allowed(ids[:end])
        assert mask is not None
        yield mask
        if not mask[token]:
            return


DEEP, DEEP_REFERENCES = 8_000, 3_500
RULES = "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(DEEP)) + f'a{DEEP}: "b"'
REFERENCES = {f"{i}": {"$ref": f"#/$defs/{i + 1}"} for i in range(DEEP_REFERENCES)}
SCHEMA = {"$ref": "#/$defs/0", "$defs": {**REFERENCES, f"{DEEP_REFERENCES}": {"const": "b"}}}


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"type": "grammar", "grammar": RULES}, "b"),
        ({"type": "json_schema", "json_schema": {"schema": SCHEMA}}, '"b"'),
    ],
)
def test_rules_within_rules_do_not_end_the_process(grammars, tokenizer, asked, text):
    """The library reads them by recursion, which has no end of its own."""
    grammar = of_response_format(asked)
    assert grammar is not None
    assert drawn(grammars, tokenizer, grammar, 0) == text


def test_a_grammar_that_is_too_long_is_not_read(grammars):
    with pytest.raises(FieldError, match="grammar of 200012 characters, expected at most 131072"):
        grammars.compile('start: "a"\n//' + "x" * 199_999, "response_format")


def test_answer_that_cannot_become_whole_is_said_to_be_none(grammars):
    constraint = grammars.constraint(grammars.compile('start: "y" T\nT: /a/ & /b/', "it"))
    mask = constraint.allowed([])
    assert mask is not None
    (only,) = mask.nonzero().flatten().tolist()
    for _ in range(2):
        with pytest.raises(ConstraintError, match="no text of this grammar goes on"):
            constraint.allowed([only])
    constraint = grammars.constraint(grammars.compile("start: /a+/", "it"))
    with pytest.raises(ConstraintError):
        constraint.allowed([only])


def marked(special: bool) -> Vocabulary:
    made = load_tokenizer(pocket_path())
    marks = [mark for one in REASONING_MARKS for mark in (one.opens, one.closes)]
    marks = [*(mark for mark in marks if mark != "<|channel>thought"), "<|channel>"]
    marks += [mark for how in TOOL_FORMATS for mark in how.shown_tokens if "=" not in mark]
    made.add_tokens(
        [AddedToken(mark, special=special, normalized=False) for mark in dict.fromkeys(marks)]
    )
    return Vocabulary(made, len(made) + 3, [0])


@pytest.fixture(scope="module")
def marking() -> Grammars:
    return Grammars(marked(special=True))


@pytest.fixture(scope="module")
def plain() -> Grammars:
    """Marks are added tokens that are not special, as in Qwen3 and GLM-4.5."""
    return Grammars(marked(special=False))


@pytest.fixture(params=["marking", "plain"])
def either(request: pytest.FixtureRequest) -> Grammars:
    return request.getfixturevalue(request.param)


def writes(maker: Grammars, grammar: str, text: str) -> bool:
    vocabulary = maker.vocabulary
    constraint = maker.constraint(maker.compile(grammar, "it"))
    ids = [*vocabulary.encode(text, add_special_tokens=False), 0]
    masks = list(masks_before(constraint, ids))
    beyond = len(vocabulary.tokenizer)
    assert not any(mask[beyond:].any() for mask in masks)
    return len(masks) == len(ids) and bool(masks[-1][0])


@pytest.mark.parametrize("marks", REASONING_MARKS, ids=lambda marks: marks.opens)
def test_reasoning_is_closed_by_its_token(either, marks):
    tokens = either.vocabulary.mark_tokens
    thought = f"I think so [/THINK {marks.closes}\n\nyes"
    ids = either.vocabulary.encode(thought, add_special_tokens=False)
    assert either.vocabulary.tokenizer.convert_tokens_to_ids(marks.closes) in ids
    for is_open in (True, False):
        grammar = after_reasoning('start: "yes" | "no"', marks, tokens, is_open=is_open)
        assert writes(either, grammar, ("" if is_open else marks.opens) + thought)
        assert writes(either, grammar, "yes") != is_open
        assert not writes(either, grammar, "I think so yes")


@pytest.mark.parametrize(
    ("either", "name"),
    [(("marking", "plain")[number % 2], name) for number, name in enumerate(CALL_TEXTS)],
    indirect=["either"],
)
def test_calls_are_enforced_as_templates_write_them(either, name):
    how, text, tokens = FORMATS[name], CALL_TEXTS[name], either.vocabulary.mark_tokens
    once, twice = text.of([("Rome", "1")]), text.of([("Rome", "1"), ("Oslo", "2")])
    needed, one, free = (
        of_tools([WEATHER, CITY], how, tokens, is_needed=is_needed, may_repeat=may_repeat)
        for is_needed, may_repeat in ((True, True), (True, False), (False, True))
    )
    assert writes(either, needed, once)
    assert writes(either, needed, twice) == (name != "llama-json")
    assert writes(either, one, once)
    assert not writes(either, one, twice)
    for wrong in (text.of([("Rome", "3")]), once.replace("weather", "rain"), "no call"):
        assert not writes(either, needed, wrong)
    before = "well " if how.bare is None else "\n"
    assert writes(either, free, before + once)
    assert writes(either, free, "no call")
    wrong = text.of([("Rome", "3")])
    assert not writes(either, free, before + wrong)
    marks = REASONING_MARKS[0]
    grammar = after_reasoning(free, marks, tokens, is_open=True, opens_calls=how.opens)
    last = once if name == "llama-json" else twice
    assert writes(either, grammar, f"I think so{marks.closes}{before}{last}")
    assert not writes(either, grammar, f"I think so{marks.closes}{before}{wrong}")
    if how.bare is None:
        assert not writes(either, grammar, f"I think so{wrong}{marks.closes}")
    assert not writes(either, grammar, f"well {once}")


def test_newer_calls_of_mistral_may_have_ids_and_follow_one_another(marking):
    how, tokens = FORMATS["mistral-args"], marking.vocabulary.mark_tokens
    call = '[TOOL_CALLS]city[ARGS]{"size": 1}'
    both = call + call.replace("[ARGS]", "[CALL_ID]a1b2c3d4e[ARGS]")
    for may_repeat in (True, False):
        grammar = of_tools([CITY], how, tokens, is_needed=True, may_repeat=may_repeat)
        assert grammar is not None
        assert writes(marking, grammar, call)
        assert writes(marking, grammar, both) == may_repeat
    sections = AnswerSections(None, how, [CITY])
    assert [*sections.add(both), *sections.end()] == [ParsedCall("city", '{"size": 1}')] * 2


ALL_ROOTS = {
    "type": "object",
    "properties": {
        "name": {"$ref": "#/$defs/Name"},
        "same": {"$ref": "#/properties/name"},
        "inner": {"$ref": "#"},
        "enum": {"enum": [{"$ref": "#/is/no/reference"}]},
    },
    "required": ["name"],
    "$defs": {"Name": {"enum": ["Rome"]}},
    "additionalProperties": False,
}


@pytest.mark.parametrize("name", ["hermes", "kimi-k2", "gemma-4", "lfm2"])
def test_references_lead_to_the_tools_own_schema(plain, name):
    how, tokens = FORMATS[name], plain.vocabulary.mark_tokens
    functions = [Function(name=one, parameters=ALL_ROOTS) for one in ("go", "gone")]
    grammar = of_tools(functions, how, tokens, is_needed=True, may_repeat=False)
    assert grammar is not None
    value = {"name": "Rome", "same": "Rome", "inner": {"name": "Rome"}}
    value["enum"] = {"$ref": "#/is/no/reference"}
    pairs = {key: json.dumps(one) for key, one in value.items()}
    whole = json.dumps(value)
    text = {
        "hermes": f'<tool_call>\n{{"name": "gone", "arguments": {whole}}}\n</tool_call>',
        "kimi-k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.gone:0"
        f"<|tool_call_argument_begin|>{whole}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "gemma-4": '<|tool_call>call:gone{name:<|"|>Rome<|"|>,same:<|"|>Rome<|"|>,'
        f"inner:{pairs['inner']},enum:{pairs['enum']}}}<tool_call|>",
        "lfm2": "<|tool_call_start|>[gone("
        + ", ".join(f"{key}={one}" for key, one in pairs.items())
        + ")]<|tool_call_end|>",
    }[name]
    assert writes(plain, grammar, text)
    assert not writes(plain, grammar, text.replace('{"name": "Rome"}', '{"name": "Oslo"}'))
    (call,) = [*(sections := AnswerSections(None, how, functions)).add(text), *sections.end()]
    assert isinstance(call, ParsedCall)
    assert (call.name, json.loads(call.arguments)) == ("gone", value)


def needed(schema: dict[str, Any], *, is_strict: bool) -> str:
    function = Function(name="city", parameters=schema, strict=is_strict)
    grammar = of_tools([function], FORMATS["hermes"], {}, is_needed=True, may_repeat=False)
    assert grammar is not None
    return grammar


def test_a_function_that_names_no_parameters_takes_none(plain):
    for parameters, takes_any in ((None, False), ({"type": "object"}, True)):
        function = Function(name="city", parameters=parameters)
        grammar = of_tools([function], FORMATS["hermes"], {}, is_needed=True, may_repeat=False)
        assert grammar is not None
        call = '<tool_call>\n{"name": "city", "arguments": %s}\n</tool_call>'
        assert writes(plain, grammar, call % "{}")
        assert writes(plain, grammar, call % '{"a": 1}') == takes_any


@pytest.mark.parametrize(
    ("more", "takes_others"),
    [
        ({}, False),
        ({"required": ["a"]}, False),
        ({"additionalProperties": True}, True),
        ({"patternProperties": {"^b": {}}}, True),
        ({"allOf": [{"properties": {"b": {"const": 2}}}]}, True),
        ({"required": ["a", "b"]}, True),
    ],
)
def test_a_function_takes_the_arguments_that_it_declares(plain, more, takes_others):
    """A model that finds no end cannot fill its call with arguments of its own."""
    function = Function(name="city", parameters={"properties": {"a": {"const": 1}}, **more})
    call = '<tool_call>\n{"name": "city", "arguments": %s}\n</tool_call>'
    grammar = of_tools([function], FORMATS["hermes"], {}, is_needed=True, may_repeat=False) or ""
    orders = ('{"a": 1, "b": 2}', '{"b": 2, "a": 1}')
    assert any(writes(plain, grammar, call % both) for both in orders) == takes_others
    assert writes(plain, grammar, call % '{"a": 1}') == (more.get("required") != ["a", "b"])


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": {"const": 1}}, "required": ["a"]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"required": ["a"]}}},
        {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"additionalProperties": {"type": "integer"}},
    ],
    ids=lambda parameters: ",".join(parameters),
)
def test_arguments_are_an_object_where_the_schema_leaves_it_out(plain, parameters):
    function = Function(name="city", parameters=parameters)
    call = '<tool_call>\n{"name": "city", "arguments": %s}\n</tool_call>'
    grammar = of_tools([function], FORMATS["hermes"], {}, is_needed=True, may_repeat=False) or ""
    assert writes(plain, grammar, call % '{"a": 1}')
    for value in ("1", '"a"', "[]", "null"):
        assert not writes(plain, grammar, call % value)


@pytest.mark.parametrize("word", ["path", "binary", "password", "int64", "url", "regex"])
def test_an_unknown_format_says_what_a_text_means(grammars, word):
    schema = {"type": "object", "properties": {"format": {"type": "string", "format": word}}}
    asked = {"type": "json_schema", "json_schema": {"schema": schema}}
    for grammar in (of_response_format(asked), needed(schema, is_strict=True)):
        grammars.compile(grammar or "", "it")
    date = {"type": "string", "format": "date"}
    asked = {"type": "json_schema", "json_schema": {"schema": date}}
    assert writes(grammars, of_response_format(asked) or "", '"2026-01-31"')
    assert not writes(grammars, of_response_format(asked) or "", '"today"')


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
        {"not": {"type": "string"}},
        {"if": {"const": 1}, "then": {"type": "integer"}},
        {"type": "object", "propertyNames": {"pattern": "^a"}},
        {"type": "array", "contains": {"type": "integer"}},
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"type": "string", "pattern": "^(?=a)[ab]+$"},
        {"type": "string", "pattern": r"^\\(a)\1$"},
        {"type": "object", "patternProperties": {"(?<!b)a": {"type": "integer"}}},
    ],
    ids=lambda schema: ",".join(schema),
)
def test_keywords_that_no_grammar_holds_bind_strict_functions_alone(grammars, schema):
    whole = {"type": "object", "properties": {"a": schema}}
    grammars.compile(needed(whole, is_strict=False), "tools")
    asked = {"type": "json_schema", "json_schema": {"schema": whole}}
    for grammar in (needed(whole, is_strict=True), of_response_format(asked) or ""):
        with pytest.raises(FieldError) as refused:
            grammars.compile(grammar, "tools")
        for ours in ("x-guidance", "%json", "start:", "tool_call", "whitespace", "coerce"):
            assert ours not in str(refused.value)


def test_a_strict_text_without_quotes_has_no_bounds():
    schema = {"type": "object", "properties": {"a": {"type": "string", "minLength": 2}}}
    for is_strict in (False, True):
        function = Function(name="city", parameters=schema, strict=is_strict)
        asked = ([function], FORMATS["qwen-xml"], {})
        if not is_strict:
            assert of_tools(*asked, is_needed=True, may_repeat=True) is not None
            continue
        with pytest.raises(FieldError, match="bounds or a pattern of a text cannot be enforced"):
            of_tools(*asked, is_needed=True, may_repeat=True)


def test_a_reference_to_itself_is_refused_where_arguments_are_written_one_by_one():
    schema = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
    function = Function(name="city", parameters=schema)
    with pytest.raises(FieldError, match="a reference to itself, cannot be enforced"):
        of_tools([function], FORMATS["glm"], {}, is_needed=True, may_repeat=True)


@pytest.mark.parametrize(
    "name", [how.name for how in TOOL_FORMATS if how.writing.argument is not None]
)
def test_a_schema_without_properties_allows_any_arguments(grammars, name):
    function = Function(name="weather", parameters={"type": "object"})
    how, text = FORMATS[name], CALL_TEXTS[name].of([("Rome", "2")])
    free = of_tools([function], how, {}, is_needed=True, may_repeat=False) or ""
    assert writes(grammars, free, text)
    (call,) = [*(sections := AnswerSections(None, how, [function])).add(text), *sections.end()]
    assert isinstance(call, ParsedCall)
    assert json.loads(call.arguments) == {"city": "Rome", "days": 2}
    closed = {"type": "object", "additionalProperties": False}
    for parameters in (None, closed, {"type": "object", "properties": {}}):
        none = Function(name="weather", parameters=parameters)
        assert not writes(
            grammars, of_tools([none], how, {}, is_needed=True, may_repeat=False) or "", text
        )


@pytest.mark.parametrize(
    "asked",
    [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": {}}}],
    ids=lambda asked: asked["type"],
)
def test_json_is_one_line_with_one_space(grammars, asked):
    """A model that finds no next word cannot fill its answer with white space."""
    grammar = of_response_format(asked) or ""
    assert writes(grammars, grammar, '{"a": [1, {"b": "c  d"}], "e": {}}')
    for text in ('{"a":1}', '{ "a": 1}', '{"a":  1}', '{\n"a": 1}', '{"a": 1 }', '{"a": [ ]}'):
        assert not writes(grammars, grammar, text)

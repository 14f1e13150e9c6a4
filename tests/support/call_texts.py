"""Answers as families of models write them: the calls of `weather` that their templates show."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class CallText:
    """How a family writes calls.

    Attributes:
        template: a part of its chat template.
        begins: stands before the first call.
        call: one; has ``CITY``, and ``DAYS`` for a number.
        between: stands between two.
        ends: stands behind the last.
    """

    template: str
    call: str
    begins: str = ""
    between: str = ""
    ends: str = ""

    def of(self, calls: Sequence[tuple[str, str]]) -> str:
        """The text of calls, each with a city and a number of days."""
        texts = [self.call.replace("CITY", city).replace("DAYS", days) for city, days in calls]
        return self.begins + self.between.join(texts) + self.ends


_PAIRS = (
    "weather\n<arg_key>city</arg_key>\n<arg_value>CITY</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>DAYS</arg_value>\n"
)
_XML = (
    "\n<function=weather>\n<parameter=city>\nCITY\n</parameter>\n"
    "<parameter=days>\nDAYS\n</parameter>\n</function>\n"
)
_JSON = '{"name": "weather", "arguments": {"city": "CITY", "days": DAYS}}'
_ARGUMENTS = '{"city": "CITY", "days": DAYS}'
CALL_TEXTS: Mapping[str, CallText] = {
    "seed-xml": CallText(
        "toolcall_begin_token = '<seed:tool_call>' ... <function=",
        f"<seed:tool_call>{_XML}</seed:tool_call>",
        between="\n",
    ),
    "qwen-xml": CallText(
        "'\\n<tool_call>\\n<function=' + tool_call.name + '>\\n'",
        f"<tool_call>{_XML}</tool_call>",
        between="\n",
    ),
    "hunyuan-pairs": CallText(
        "<tool_calls>\\n<tool_call>' + name + '<tool_sep>' ... <arg_key>",
        "\n<tool_call>" + _PAIRS.replace("weather\n", "weather<tool_sep>\n") + "</tool_call>",
        begins="<tool_calls>",
        ends="\n</tool_calls>",
    ),
    "longcat": CallText(
        "<longcat_tool_call>{function-name}\\n<longcat_arg_key>",
        "<longcat_tool_call>" + _PAIRS.replace("arg_", "longcat_arg_") + "</longcat_tool_call>",
        between="\n",
    ),
    "glm": CallText(
        "<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key>\\n<arg_value>",
        f"<tool_call>{_PAIRS}</tool_call>",
        between="\n",
    ),
    "minimax": CallText(
        "{%- set toolcall_begin_token = '<minimax:tool_call>' -%} <invoke name=",
        '<invoke name="weather">\n<parameter name="city">CITY</parameter>\n'
        '<parameter name="days">DAYS</parameter>\n</invoke>\n',
        begins="<minimax:tool_call>\n",
        ends="</minimax:tool_call>",
    ),
    "kimi-k2": CallText(
        "<|tool_calls_section_begin|> ... <|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>",
        "<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        + _ARGUMENTS
        + "<|tool_call_end|>",
        begins="<|tool_calls_section_begin|>",
        ends="<|tool_calls_section_end|>",
    ),
    "deepseek-v3": CallText(
        "'<｜tool▁calls▁begin｜>...' + type + '<｜tool▁sep｜>' + name + '\\n```json'",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        + _ARGUMENTS
        + "\n```<｜tool▁call▁end｜>",
        begins="<｜tool▁calls▁begin｜>",
        ends="<｜tool▁calls▁end｜>",
    ),
    "deepseek-v3.1": CallText(
        "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' + arguments",
        f"<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{_ARGUMENTS}<｜tool▁call▁end｜>",
        begins="<｜tool▁calls▁begin｜>",
        ends="<｜tool▁calls▁end｜>",
    ),
    "gemma-4": CallText(
        "'<|tool_call>call:' + function['name'] + '{' ... '<|\"|>' ... '}<tool_call|>'",
        '<|tool_call>call:weather{city:<|"|>CITY<|"|>,days:DAYS}<tool_call|>',
    ),
    "lfm2": CallText(
        "'List of tools: <|tool_list_start|>['",
        'weather(city="CITY", days=DAYS)',
        begins="<|tool_call_start|>[",
        between=", ",
        ends="]<|tool_call_end|>",
    ),
    "llama-pythonic": CallText(
        "[func_name1(params_name1=params_value1, params_name2=params_value2...)]",
        'weather(city="CITY", days=DAYS)',
        begins="[",
        between=", ",
        ends="]",
    ),
    "hunyuan": CallText(
        "'<tool_calls>[' ... ']</tool_calls>'",
        _JSON,
        begins="<tool_calls>[",
        between=", ",
        ends="]</tool_calls>",
    ),
    "hermes": CallText(
        '<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}',
        f"<tool_call>\n{_JSON}\n</tool_call>",
        between="\n",
    ),
    "mistral-args": CallText(
        "'[TOOL_CALLS]' + name + '[ARGS]' + arguments", f"[TOOL_CALLS]weather[ARGS]{_ARGUMENTS}"
    ),
    "mistral": CallText(
        "'[TOOL_CALLS][' ... ']'", _JSON, begins="[TOOL_CALLS][", between=", ", ends="]"
    ),
    "llama-json": CallText(
        '{"name": function name, "parameters": dictionary}',
        _JSON.replace("arguments", "parameters"),
    ),
}
"""One for each of `TOOL_FORMATS`."""

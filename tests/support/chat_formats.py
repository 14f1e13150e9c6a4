"""Chat templates of published families, written from their formats, and conversations as each
writes them by hand, with what is trained on in double brackets."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Format:
    template: str
    written: str  # of CONVERSATION
    end: str  # the tokenizer's end of text
    stops: tuple[str, ...] = ()  # further tokens that end an answer
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def specials(self) -> list[str]:
        return sorted({self.end, *self.stops})


CONVERSATION = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "Bye."},
]
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
WITH_TOOLS = [
    {"role": "user", "content": "What time is it?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "now", "arguments": "{}"}}],
    },
    {"role": "tool", "content": "noon"},
    {"role": "assistant", "content": "It is noon."},
]

_EACH = "{% for m in messages %}"
_LAST = "{% endfor %}{% if add_generation_prompt %}"
_CHATML = (
    _EACH + "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    f"{_LAST}{{{{ '<|im_start|>assistant\\n' }}}}{{% endif %}}"
)
_CHATML_WRITTEN = (
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[[Hello!<|im_end|>]]\n"
    "<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n[[Bye.<|im_end|>]]\n"
)

FORMATS = {
    "qwen2_moe": Format(_CHATML, _CHATML_WRITTEN, "<|im_end|>", ("<|endoftext|>",)),
    # published models end a text by another token than a message
    "chatml_stops": Format(_CHATML, _CHATML_WRITTEN, "<|endoftext|>", ("<|im_end|>",)),
    "marked": Format(
        _EACH + "{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
        "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}",
        _CHATML_WRITTEN,
        "<|im_end|>",
    ),
    "mixtral": Format(
        "{{ '<s>' }}" + _EACH + "{% if m.role == 'user' %}{{ ' [INST] ' + m.content + ' [/INST]' }}"
        "{% else %}{{ ' ' + m.content + '</s>' }}{% endif %}{% endfor %}",
        "<s> [INST] Hi [/INST][[ Hello!</s>]] [INST] And now? [/INST][[ Bye.</s>]]",
        "</s>",
    ),
    "deepseek_v3": Format(
        "{{ '<|bos|>' }}"
        + _EACH
        + "{% if m.role == 'user' %}{{ '<|User|>' + m.content }}{% else %}"
        "{{ '<|Assistant|>' + m.content + '<|eos|>' }}{% endif %}"
        f"{_LAST}{{{{ '<|Assistant|>' }}}}{{% endif %}}",
        "<|bos|><|User|>Hi<|Assistant|>[[Hello!<|eos|>]]"
        "<|User|>And now?<|Assistant|>[[Bye.<|eos|>]]",
        "<|eos|>",
    ),
    # ends the last answer otherwise than those before
    "gpt_oss": Format(
        _EACH + "{% if m.role == 'user' %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}"
        "{% else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
        "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endif %}"
        f"{_LAST}{{{{ '<|start|>assistant' }}}}{{% endif %}}",
        "<|start|>user<|message|>Hi<|end|><|start|>assistant"
        "[[<|channel|>final<|message|>Hello!<|end|>]]"
        "<|start|>user<|message|>And now?<|end|><|start|>assistant"
        "[[<|channel|>final<|message|>Bye.<|return|>]]",
        "<|return|>",
    ),
    # ends an answer by the beginning of the next message
    "glm4_moe": Format(
        "{{ '[gMASK]<sop>' }}"
        + _EACH
        + "{% if m.role == 'user' %}{{ '<|user|>\\n' + m.content }}{% else %}"
        "{{ '<|assistant|>\\n<think></think>\\n' + m.content }}{% endif %}"
        f"{_LAST}{{{{ '<|assistant|>' }}}}{{% endif %}}",
        "[gMASK]<sop><|user|>\nHi<|assistant|>[[\n<think></think>\nHello!<|user|>]]\nAnd now?"
        "<|assistant|>[[\n<think></think>\nBye.<|endoftext|>]]",
        "<|endoftext|>",
        ("<|user|>", "<|observation|>"),
    ),
    "llama4": Format(
        "{{ '<|begin_of_text|>' }}"
        + _EACH
        + "{{ '<|header_start|>' + m.role + '<|header_end|>\\n\\n'"
        " + m.content + '<|eot|>' }}"
        f"{_LAST}{{{{ '<|header_start|>assistant<|header_end|>\\n\\n' }}}}{{% endif %}}",
        "<|begin_of_text|><|header_start|>user<|header_end|>\n\nHi<|eot|>"
        "<|header_start|>assistant<|header_end|>\n\n[[Hello!<|eot|>]]"
        "<|header_start|>user<|header_end|>\n\nAnd now?<|eot|>"
        "<|header_start|>assistant<|header_end|>\n\n[[Bye.<|eot|>]]",
        "<|eot|>",
    ),
    "olmoe": Format(
        "{{ '|||IP|||' }}"
        + _EACH
        + "{% if m.role == 'user' %}{{ '<|user|>\\n' + m.content + '\\n' }}"
        "{% else %}{{ '<|assistant|>\\n' + m.content + '|||IP|||' }}"
        "{{ '' if loop.last else '\\n' }}{% endif %}"
        f"{_LAST}{{{{ '<|assistant|>\\n' }}}}{{% endif %}}",
        "|||IP|||<|user|>\nHi\n<|assistant|>\n[[Hello!|||IP|||]]\n"
        "<|user|>\nAnd now?\n<|assistant|>\n[[Bye.|||IP|||]]",
        "|||IP|||",
    ),
    "granitemoe": Format(
        _EACH + "{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + '<|end|>\\n' }}"
        f"{_LAST}{{{{ '<|start_of_role|>assistant<|end_of_role|>' }}}}{{% endif %}}",
        "<|start_of_role|>user<|end_of_role|>Hi<|end|>\n<|start_of_role|>assistant<|end_of_role|>"
        "[[Hello!<|end|>]]\n<|start_of_role|>user<|end_of_role|>And now?<|end|>\n"
        "<|start_of_role|>assistant<|end_of_role|>[[Bye.<|end|>]]\n",
        "<|end|>",
    ),
    "kimi_k2": Format(
        _EACH
        + "{{ '<|im_' + m.role + '|>' + m.role + '<|im_middle|>' + m.content + '<|im_end|>' }}"
        f"{_LAST}{{{{ '<|im_assistant|>assistant<|im_middle|>' }}}}{{% endif %}}",
        "<|im_user|>user<|im_middle|>Hi<|im_end|><|im_assistant|>assistant<|im_middle|>"
        "[[Hello!<|im_end|>]]<|im_user|>user<|im_middle|>And now?<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>[[Bye.<|im_end|>]]",
        "<|im_end|>",
    ),
    # writes an empty thought before the last answer alone
    "qwen3_moe": Format(
        _EACH + "{{ '<|im_start|>' + m.role + '\\n' }}{% if loop.last and m.role == 'assistant' %}"
        "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{{ m.content + '<|im_end|>\\n' }}"
        f"{_LAST}{{{{ '<|im_start|>assistant\\n' }}}}{{% endif %}}",
        _CHATML_WRITTEN.replace("[[Bye.", "[[<think>\n\n</think>\n\nBye."),
        "<|im_end|>",
    ),
    "gemma": Format(
        "{{ '<bos>' }}" + _EACH + "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else "
        "m.role) + '\\n' + m.content + '<end_of_turn>\\n' }}"
        f"{_LAST}{{{{ '<start_of_turn>model\\n' }}}}{{% endif %}}",
        "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n[[Hello!<end_of_turn>]]\n"
        "<start_of_turn>user\nAnd now?<end_of_turn>\n<start_of_turn>model\n[[Bye.<end_of_turn>]]\n",
        "<eos>",
        ("<end_of_turn>",),
    ),
}

HERMES = (
    "{% if tools %}{{ '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}"
    + _EACH
    + "{{ '<|im_start|>' + m.role + '\\n' + m.content }}{% for call in m.tool_calls or () %}"
    "{{ '<tool_call>' + call.function.name + (call.function.arguments | tojson) + '</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\\n' }}"
    f"{_LAST}{{{{ '<|im_start|>assistant\\n' }}}}{{% endif %}}"
)
HERMES_WRITTEN = (
    '<|im_start|>system\n[{"type": "function", "function": {"name": "now", "parameters": '
    '{"type": "object"}}}]<|im_end|>\n<|im_start|>user\nWhat time is it?<|im_end|>\n'
    "<|im_start|>assistant\n[[<tool_call>now{}</tool_call><|im_end|>]]\n<|im_start|>tool\n"
    "noon<|im_end|>\n<|im_start|>assistant\n[[It is noon.<|im_end|>]]\n"
)

"""Markers that a chat template writes, such as `<|im_start|>`, and which of them may be text.

A model sees a special token as one id. Where the vocabulary lacks it, the marker falls into pieces that the
model has never seen as a marker, and a user's text can spell it. So a marker has to be one token, unless
published models were trained on its pieces:

    <|user|> <|system|>         headers of roles: Zephyr, TinyLlama, Tulu, OLMo, H2O Danube
    <|begin_of_thought|>        thinking and tools, in preambles that describe them to the model
    [INST] <<SYS>> <think>      of another form: Llama 2, Mistral v0.1, and many reasoning models
"""

import re
from collections.abc import Iterable, Iterator

_SHAPES = (
    r"<\|[^\s<>|]+\|?>",  # <|im_start|>, <|turn>
    r"<[^\s<>|]+\|>",  # <turn|>
    r"<\uff5c[^\s<>\uff5c]+\uff5c>",  # DeepSeek's <｜User｜>
    r"<(?:start|begin|end)_of_\w+>",  # Gemma's <start_of_turn>
)
_ROLES = (
    "system|developer|user|human|prompter|prompt|question|instruction|assistant|bot|ai|gpt|model|chatbot|"
    "answer|response|tool|function|observation"
)
_MAY_BE_TEXT = re.compile(
    rf"<\|(?:(?:{_ROLES})|[^|]*(?:think|thought|reason|solution|tool|function)[^|]*)\|>", re.IGNORECASE
)


def markers_in(text: str, declared: Iterable[str] = ()) -> Iterator[re.Match[str]]:
    """Yield the markers in a text that a template wrote.

    Args:
        declared: special tokens that the model's files name, such as `bos_token`; they have any form.

    >>> [found[0] for found in markers_in("<s><|user|>Hi<end_of_turn><b>", ["<s>"])]
    ['<s>', '<|user|>', '<end_of_turn>']
    """
    names = sorted(filter(None, declared), key=len, reverse=True)
    return re.finditer("|".join([*map(re.escape, names), *_SHAPES]), text)


def may_be_text(marker: str) -> bool:
    """Return True if published models were trained on such a marker in pieces.

    >>> [may_be_text(name) for name in ("<|user|>", "<|im_start|>", "<|start_header_id|>")]
    [True, False, False]
    """
    return _MAY_BE_TEXT.fullmatch(marker) is not None

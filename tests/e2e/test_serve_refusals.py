"""Requests that are mistakes: each is refused with what is wrong, the value, and what to do."""

import json

import pytest

from tests.serving import ADD, CONTEXT, HELLO

CHAT = {"messages": HELLO}
LONG = "the " * 10**6
CALLED, ARGUMENTS = {"id": "call_1", "type": "function"}, {"name": "add", "arguments": "[1]"}
REFUSED = {
    "too long": (
        "completions",
        {"prompt": [1] * CONTEXT},
        f"maximum context length is {CONTEXT} tokens, and the prompt is too long: it has",
    ),
    "too many bytes": (
        "completions",
        {"prompt": LONG},
        "maximum context length is 4096 tokens",
    ),
    "too many bytes in a list": ("completions", {"prompt": ["a", LONG]}, "prompt has 4,000,000 bytes"),
    "too many bytes said": (
        "chat/completions",
        {"messages": [{"role": "user", "content": LONG}]},
        "messages has 4,000,0",
    ),
    "too many bytes of input": (
        "responses",
        {"input": LONG},
        "bytes; 4,096 tokens hold at most",
    ),
    "too many bytes to embed": ("embeddings", {"input": [LONG]}, "input has 4,000,000 bytes"),
    "too many bytes to tokenize": ("/tokenize", {"prompt": LONG}, "prompt has 4,000,000 bytes"),
    "too many bytes to tokenize of a chat": (
        "/tokenize",
        {"messages": [{"role": "user", "content": LONG}]},
        "messages has 4,000,0",
    ),
    "too many tokens": (
        "completions",
        {"prompt": "a", "max_tokens": CONTEXT},
        "maximum context length is 4096 tokens, and the prompt is too long for that answer: it has 1 token,",
    ),
    "unknown key inside": (
        "completions",
        {"prompt": "a", "stream": True, "stream_options": {"include_usag": True}},
        "stream_options.include_usag: unknown key.",
    ),
    "unknown key": (
        "completions",
        {"prompt": "a", "best_off": 3},
        "best_off: unknown key (did you mean 'best_of'?).",
    ),
    "wrong type": ("completions", {"prompt": "a", "n": "2"}, "n: Input should be a valid integer (got '2')"),
    "no form": (
        "completions",
        {"prompt": {"text": "a"}},
        "prompt: Must be a text, a list of texts, a list of token ids, or a list of up to 10,000 such lists "
        "(got {'text': 'a'}).",
    ),
    "stop of numbers": ("completions", {"prompt": "a", "stop": [1]}, "stop: Must be a text or a list of"),
    "not finite": ("completions", '{"prompt": "a", "temperature": NaN}', "temperature: "),
    "no JSON": ("completions", '{"prompt":', "The body is not JSON: Expecting value (character 10)."),
    "no UTF-8": ("completions", b'{"prompt": "\xff"}', "The body is not JSON: byte 12 is not UTF-8."),
    "deep": ("completions", "[" * 100_000, "it is nested too deeply."),
    "many digits": ("completions", '{"prompt": "a", "n": ' + "9" * 5000 + "}", "too many digits."),
    "no prompt": ("completions", {}, "prompt: this key is missing"),
    "no role": (
        "chat/completions",
        {"messages": [{"content": "x"}]},
        "messages.0: Must be a message with a 'role'",
    ),
    "many mistakes": (
        "chat/completions",
        {"messages": [{}] * 9},
        "messages.0: Must be a message with a 'role' (got {}).",
    ),
    "half a character": (
        "completions",
        '{"prompt": "\\ud83d"}',
        "The body is not Unicode text: '\\ud83d' is half of a pair",
    ),
    "half in a pattern": (
        "completions",
        '{"prompt": "a", "response_format": {"type": "regex", "regex": "\\udfff"}}',
        "is half of a pair",
    ),
    "half in what comes back": (
        "responses",
        '{"input": "a", "metadata": {"a": "\\uD800"}}',
        "half of a pair",
    ),
    "unknown token": ("completions", {"prompt": [9999]}, "a token id outside the"),
    "empty list": ("completions", {"prompt": []}, "empty list"),
    "many prompts": ("completions", {"prompt": ["a"] * 129}, "the limit is 128"),
    "many answers": ("completions", {"prompt": "a", "n": 17}, "n is at most 16 (got 17)"),
    "many stops": ("completions", {"prompt": "a", "stop": ["a"] * 17}, "the limit is 16"),
    "empty stop": ("completions", {"prompt": "a", "stop": ""}, "A stop text must have 1 to 256"),
    "bias of no token": ("completions", {"prompt": "a", "logit_bias": {"x": 1.0}}, "not a token id below"),
    "best_of": ("completions", {"prompt": "a", "best_of": 3}, "best_of must equal n"),
    "no messages": ("chat/completions", {"messages": []}, "messages: "),
    "unknown role": ("chat/completions", {"messages": [{"role": "critic", "content": "x"}]}, "no critics"),
    "usage of no stream": (
        "completions",
        {"prompt": "a", "stream_options": {"include_usage": True}},
        "stream_options is given without stream",
    ),
    "usage of no streamed chat": ("chat/completions", {**CHAT, "stream_options": {}}, "without stream: true"),
    "a streamed prompt": (
        "completions",
        {"prompt": "a", "prompt_logprobs": 1, "stream": True},
        "prompt_logprobs are not part of a stream",
    ),
    "a prompt of no tokens": (
        "completions",
        {"prompt": "a", "truncate_prompt_tokens": 0},
        "or at least 1 (got 0)",
    ),
    "many log-probabilities of a prompt": (
        "completions",
        {"prompt": [1] * 4000, "prompt_logprobs": -1},
        "and the limit is 262,144. Ask for shorter prompts",
    ),
    "all of the vocabulary for answers": ("completions", {"prompt": "a", "logprobs": -1}, "logprobs: "),
    "a side without a length": (
        "embeddings",
        {"input": "a", "truncation_side": "left"},
        "truncation_side is given without truncate_prompt_tokens",
    ),
    "no such side": ("score", {"text_1": "a", "text_2": "b", "truncation_side": "top"}, "truncation_side: "),
    "a token that is not there": (
        "completions",
        {"prompt": "a", "allowed_token_ids": [1, 400]},
        "outside the vocabulary",
    ),
    "a likely token that is not there": (
        "chat/completions",
        {**CHAT, "logprobs": True, "logprob_token_ids": [400]},
        "logprob_token_ids has a token id outside the vocabulary",
    ),
    "tokens to tell without the rest": (
        "chat/completions",
        {**CHAT, "logprob_token_ids": [5]},
        "logprob_token_ids is given without logprobs",
    ),
    "no token is allowed": ("completions", {"prompt": "a", "allowed_token_ids": []}, "at least 1 item"),
    "many tokens are allowed": (
        "completions",
        {"prompt": "a", "allowed_token_ids": [1] * 4097},
        "at most 4096",
    ),
    "many tokens to tell": (
        "completions",
        {"prompt": "a", "logprobs": 0, "logprob_token_ids": [1] * 129},
        "at most 128",
    ),
    "many bad words": ("completions", {"prompt": "a", "bad_words": ["a"] * 129}, "at most 128"),
    "a long bad word": ("completions", {"prompt": "a", "bad_words": ["a" * 257]}, "at most 256"),
    "many documents": ("chat/completions", {**CHAT, "documents": [{}] * 1025}, "at most 1024"),
    "many texts to rank": ("rerank", {"query": "a", "documents": ["a"] * 2049}, "the limit is 2,048"),
    "many texts to score": ("score", {"text_1": "a", "text_2": ["a"] * 2100}, "text_2 has 2,100 entries"),
    "texts that make no pairs": ("score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1 has 2 texts and"),
    "nothing to rank": ("rerank", {"query": "a", "documents": []}, "at least 1 item"),
    "an empty question": (
        "rerank",
        {"query": [], "documents": ["a"]},
        "query: Input should be a valid string",
    ),
    "image": (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        'messages.0.content: Must be a text or a list of {"type": "text", "text": ...}',
    ),
    "no content": ("chat/completions", {"messages": [{"role": "user"}]}, "messages.0.content: this key is"),
    "odd choice": ("chat/completions", {**CHAT, "tools": [ADD], "tool_choice": "add"}, 'be "none", "auto",'),
    "arguments of no object": (
        "chat/completions",
        {"messages": [{"role": "assistant", "tool_calls": [{**CALLED, "function": ARGUMENTS}]}]},
        "The arguments of a tool call are not a JSON object (got '[1]')",
    ),
    "call of nothing": ("chat/completions", {**CHAT, "tool_choice": "required"}, "there are no tools"),
    "unknown tool": (
        "chat/completions",
        {**CHAT, "tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}},
        "tool_choice names 'sub'",
    ),
    "filling in": (
        "completions",
        {"prompt": "a", "suffix": "b"},
        "suffix: Text is not inserted before a suffix: leave it out (got 'b').",
    ),
    "many texts": ("embeddings", {"input": ["a"] * 2049}, "the limit is 2,048"),
    "top_logprobs": ("chat/completions", {**CHAT, "top_logprobs": 2}, "without logprobs"),
    "embedding nothing": ("embeddings", {"input": []}, "empty list"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_mistake_is_400_and_says_what_to_do(http, name):
    route, body, message = REFUSED[name]
    content = body if isinstance(body, str | bytes) else json.dumps(body)
    path = route if route.startswith("/") else f"/v1/{route}"
    reply = http.post(path, content=content, headers={"Content-Type": "application/json"})
    error = reply.json()["error"]
    assert (reply.status_code, error["type"]) == (400, "invalid_request_error"), reply.text
    assert message in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        (
            {"Content-Type": "text/plain"},
            "(got Content-Type: text/plain). Send `Content-Type: application/json`.",
        ),
        ({}, "(got Content-Type: none)"),
        ({"Content-Type": "application/json", "Content-Encoding": "gzip"}, "Compressed bodies are refused"),
    ],
)
def test_a_body_that_is_not_declared_to_be_json_is_refused(http, headers, message):
    reply = http.post("/v1/completions", content='{"prompt": "a"}', headers=headers)
    assert reply.status_code == 415  # without a type: what a form of any web page could send
    assert message in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("GET", "/v2", 404, "There is no route /v2. Known: /detokenize, "),
        ("POST", "/chat/completions", 404, "Did you mean '/v1/chat/completions'?"),
        ("GET", "/v1/completions", 405, "GET is not supported by /v1/completions. Use POST."),
    ],
)
def test_an_address_that_is_not_there_is_told_what_is(http, method, path, status, message):
    reply = http.request(method, path)
    assert reply.status_code == status
    assert message in reply.json()["error"]["message"]


def test_a_conversation_that_is_too_long_names_its_messages(http):
    reply = http.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "a" * 2 * CONTEXT}]}
    )
    assert reply.json()["error"].items() >= {"param": "messages", "code": "context_length_exceeded"}.items()

"""Chat prompts and training rows of each release, as token ids. Needs the tokenizer only, no torch.

Text and special tokens never mix: special ids are put in as ids, so a role or a mask token that a user types stays
text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from glmexp.config.errors import DataError, Problem

Message = Mapping[str, Any]
Supervise = Literal["last", "all"]

ROLES = ("system", "user", "assistant", "observation")
V1_SPECIAL_TOKENS = 5
"""Entries of a v1 tokenizer's added_tokens_encoder when nobody has added a token."""
ROUNDS = {
    # release: (number of the first round, one round, the question that is to be answered)
    "chatglm": (0, "[Round {}]\n问：{}\n答：{}\n", "[Round {}]\n问：{}\n答："),
    "chatglm2": (1, "[Round {}]\n\n问：{}\n\n答：{}\n\n", "[Round {}]\n\n问：{}\n\n答："),
}


@dataclass(frozen=True)
class ChatIds:
    """Token ids of a row, and which of them the model learns to give.

    ``supervised[i]`` is True where ``ids[i]`` is a label (the loss shifts by one itself).
    """

    ids: list[int]
    supervised: list[bool]

    def __post_init__(self) -> None:
        assert len(self.ids) == len(self.supervised), "one flag a token"

    def labels(self, ignore: int = -100) -> list[int]:
        """The ids where they are supervised, ``ignore`` elsewhere."""
        return [index if flag else ignore for index, flag in zip(self.ids, self.supervised, strict=True)]


def render_chat(tokenizer: Any, messages: Sequence[Message], supervise: Supervise = "last") -> ChatIds:
    """A training row: the whole conversation, which ends with an answer of the assistant.

    ``messages``: dicts with ``role`` (system, user, assistant, observation) and ``content``; for v3 also ``metadata``
    (the line after the role, a tool's name) and, on system messages, ``tools`` (a list, written as JSON).

    v1: ``prompt [gMASK] sop answer eop``, supervised from sop on, as the release trains. v2: ``[gMASK] sop prompt
    answer </s>``. In both, earlier rounds are part of the prompt's text and only the last answer can be supervised; a
    system message stands in front of the prompt, on lines of its own (the releases have no system role). v3: every
    message with its role token, then ``</s>``; supervised are the answers after ``<|assistant|>`` and the token
    behind each answer (the next role or ``</s>``): all of them or the last, by ``supervise``.

    Raises DataError for an unknown role, a wrong order or something that the release has no place for.
    """
    release = release_of(tokenizer)
    if not messages or messages[-1]["role"] != "assistant":
        raise DataError(Problem("messages", "a training row must end with an assistant message"))
    if release == "chatglm3":
        return _render_chatglm3(tokenizer, messages, supervise)
    rounds = sum(message["role"] == "assistant" for message in messages)
    if supervise == "all" and rounds > 1:
        raise DataError(
            Problem(
                "supervise",
                f"'all' with {rounds} answers: {release} puts earlier rounds into the prompt's text",
                "use supervise=last, or make one row of each round",
            )
        )
    answer = encode_text(tokenizer, str(messages[-1]["content"]))
    return join_row(tokenizer, encode_text(tokenizer, prompt_text(release, messages[:-1])), answer)


def join_row(tokenizer: Any, prompt: Sequence[int], answer: Sequence[int]) -> ChatIds:
    """One training row of v1 or v2 from the ids of prompt and answer, both without special tokens (and truncated by the
    caller, if at all)."""
    if release_of(tokenizer) == "chatglm":
        context = [*prompt, tokenizer.gmask_token_id]
        target = [tokenizer.bos_token_id, *answer, tokenizer.eos_token_id]
    else:
        context = [*tokenizer.get_prefix_tokens(), *prompt]
        target = [*answer, tokenizer.eos_token_id]
    return ChatIds([*context, *target], [False] * len(context) + [True] * len(target))


def prompt_ids(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """The ids that a generation starts from: they end where the answer to the last message begins."""
    release = release_of(tokenizer)
    if not messages or messages[-1]["role"] == "assistant":
        raise DataError(Problem("messages", "a prompt must end with a message that the assistant is to answer"))
    if release == "chatglm3":
        ids = tokenizer.get_prefix_tokens()
        for message in messages:
            ids += _message_ids(tokenizer, message)
        return [*ids, tokenizer.get_command("<|assistant|>")]
    text = encode_text(tokenizer, prompt_text(release, messages))
    return tokenizer.build_inputs_with_special_tokens(text)


def stop_ids(tokenizer: Any) -> list[int]:
    """The ids that end an answer: v1 eop, v2 ``</s>``, v3 also ``<|user|>`` and ``<|observation|>``."""
    if release_of(tokenizer) == "chatglm3":
        roles = [tokenizer.get_command(f"<|{role}|>") for role in ("user", "observation")]
        return [tokenizer.eos_token_id, *roles]
    return [tokenizer.eos_token_id]


def answer_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of generated ids, cut at the first stop token and stripped as the releases strip it. Negative ids, such
    as the -100 of a label that does not count, stand for nothing."""
    stops = set(stop_ids(tokenizer))
    length = next((place for place, index in enumerate(ids) if index in stops), len(ids))
    real = [index for index in ids[:length] if index >= 0]
    return str(tokenizer.decode(real, skip_special_tokens=True)).strip()


def release_of(tokenizer: Any) -> str:
    """``chatglm``, ``chatglm2`` or ``chatglm3``; DataError for a tokenizer of another family."""
    release = getattr(tokenizer, "release", None)
    if release not in ("chatglm", "chatglm2", "chatglm3"):
        raise DataError(
            Problem(
                "tokenizer",
                f"{type(tokenizer).__name__} has no ChatGLM chat format",
                "use one of the ChatGLM tokenizers, or the chat template of the tokenizer's own family",
            )
        )
    return str(release)


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text without special tokens around it.

    v1's tokenizer reads ``[MASK]``, ``<sop>``, ``<eop>`` and the like in a text as special tokens; a chat's text may
    not do that (a typed ``<sop>`` would end the prompt), so there they are read as text. Added tokens are still read.
    """
    if release_of(tokenizer) == "chatglm":
        plain = any(token in text for token in tokenizer.special_tokens_map.values())
        if plain or len(tokenizer.added_tokens_encoder) > V1_SPECIAL_TOKENS:
            return tokenizer.encode(text, add_special_tokens=False, split_special_tokens=plain)
        # What tokenizer.encode does where no added token can be in the text, without its bookkeeping (4 times as fast).
        first = tokenizer.num_image_tokens
        return [first + index for index in tokenizer.sp_model.encode(tokenizer.preprocess(text))]
    if tokenizer.reads_marks:
        return tokenizer.encode(text, add_special_tokens=False)
    return tokenizer.sp_model.encode(text)


def prompt_text(release: str, messages: Sequence[Message]) -> str:
    """The prompt of v1 and v2 as text: all rounds, ending where the answer begins.

    v1 writes a lone question as it is; else rounds count from 0. v2 always writes rounds, from 1.
    """
    first, finished, open_round = ROUNDS[release]
    roles = [message["role"] for message in messages]
    system = [str(message["content"]) for message in messages[:1] if roles[0] == "system"]
    turns = messages[len(system) :]
    for place, message in enumerate(turns):
        wanted = "assistant" if place % 2 else "user"
        if message["role"] != wanted:
            raise DataError(
                Problem(
                    f"messages[{place + len(system)}]",
                    f"role {message['role']!r} where {release} needs {wanted!r}",
                    "one optional system message, then user and assistant in turns",
                )
            )
    if len(turns) % 2 == 0:
        raise DataError(Problem("messages", "no question of the user that is to be answered"))
    question = str(turns[-1]["content"])
    gap = "\n" if release == "chatglm" else "\n\n"
    head = "".join(text + gap for text in system)
    if release == "chatglm" and len(turns) == 1:
        return head + question
    pairs = [(str(turns[i]["content"]), str(turns[i + 1]["content"])) for i in range(0, len(turns) - 1, 2)]
    rounds = [finished.format(first + number, *pair) for number, pair in enumerate(pairs)]
    return head + "".join(rounds) + open_round.format(first + len(pairs), question)


def _message_ids(tokenizer: Any, message: Message) -> list[int]:
    """v3: ids of one message."""
    role, content = message["role"], str(message["content"])
    if role not in ROLES:
        raise DataError(Problem("messages", f"role {role!r} is unknown", f"one of {', '.join(ROLES)}"))
    if message.get("tools"):
        if role != "system":
            raise DataError(Problem("messages", f"tools on a {role} message", "put them on the system message"))
        content += "\n" + json.dumps(message["tools"], indent=4, ensure_ascii=False)
    metadata = message.get("metadata")
    head = encode_text(tokenizer, f"{metadata}\n") if metadata else _empty_line(tokenizer)
    return [tokenizer.get_command(f"<|{role}|>"), *head, *encode_text(tokenizer, content)]


def _empty_line(tokenizer: Any) -> list[int]:
    """Ids of the line behind a role without metadata; every message of every row has it, so it is kept."""
    known: dict[str, list[int]] = tokenizer.__dict__.setdefault("_glmexp_lines", {})
    if "\n" not in known:
        known["\n"] = encode_text(tokenizer, "\n")
    return known["\n"]


def _render_chatglm3(tokenizer: Any, messages: Sequence[Message], supervise: Supervise) -> ChatIds:
    """v3: a token is a label if the token before it belongs to a supervised answer."""
    ids = tokenizer.get_prefix_tokens()
    answers = [False] * len(ids)
    for place, message in enumerate(messages):
        part = _message_ids(tokenizer, message)
        learned = message["role"] == "assistant" and (supervise == "all" or place == len(messages) - 1)
        ids += part
        answers += [learned] * len(part)
    return ChatIds([*ids, tokenizer.eos_token_id], [False, *answers])

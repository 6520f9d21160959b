"""Prompts of random words, and the text or the messages in which a conversation grows.

Words are drawn by keys: equal keys give equal words in every process. All words have four letters, so that a
byte-level tokenizer makes equally many tokens of each, too.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

_LIST = """
able area army away baby back ball band bank base bath bear beat bell best bird blue boat body bone
book born both bowl call calm camp card care case cash cell city club coal coat cold cook cool copy
corn cost crew crop dark data date dawn days deal deep deer desk dish door down draw drop dust duty
each earn east easy edge else even ever face fact fair fall farm fast fear feel file film find fine
fire firm fish five flag flat flow food foot form four free fuel full fund gain game gate gift girl
give goal gold good gray grow hair half hall hand hard head hear heat help here high hill hold hole
home hope host hour huge idea iron item join jump keep kind king kiss knee know lack lady lake land
last late lead leaf left less life lift like line link list live load loan long look lord lose loss
love luck main make many mark mass meal mean meat meet milk mind mine miss moon more most move much
name near neck need news next nine node none noon nose note open oven over pack page pain pair palm
park part past path peak pick pile pink pipe plan play plot poem pole pond pool post pull pure push
race rain rank rate read real rest rice rich ride ring rise risk road rock role roof room root rope
rule safe sail salt same sand save seat seed seem self sell send ship shop show side sign silk size
skin slow snow soft soil some song soon sort soul spot star stay step stop such suit sure swim tail
take talk tall task team tell tent term test text than them then thin time tiny tone tool tour town
tree trip true tube turn twin type unit upon user vary vast very view vote wait wake walk wall want
warm wash wave week well west what wide wife wild wind wine wing wire wise wish wood word work yard
"""
WORDS = _LIST.split()
# Token ids that stand for single bytes of ordinary letters in byte-level vocabularies.
TOKEN_IDS = range(32, 127)

Piece = str | list[int]
"""Text or token ids of one message."""


class Api(StrEnum):
    """The route, and the form of a prompt."""

    CHAT = "chat"
    """Messages to /v1/chat/completions."""
    COMPLETIONS = "completions"
    """Text to /v1/completions."""
    TOKENS = "tokens"
    """Token ids to /v1/completions, whose answers have token ids, too (vLLM)."""

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self is Api.CHAT else "/v1/completions"


@dataclass(frozen=True)
class Scale:
    """Tokens of prompts at one endpoint."""

    word: float = 1.0
    """Mean tokens per word."""
    prompt: float = 0.0
    """Tokens of each prompt beside its messages: begin of sequence, the template's end."""
    message: float = 0.0
    """Tokens of each message beside its words."""

    def words(self, tokens: float, *, begins: bool = False) -> int:
        """Returns how many words a message of so many tokens has. ``begins``: it is the prompt's first."""
        return max(1, round((tokens - self.message - begins * self.prompt) / self.word))


def piece(api: Api, key: str, count: int) -> Piece:
    """Returns ``count`` random words, or token ids for the api `tokens`."""
    numbers = random.Random(key)
    if api is Api.TOKENS:
        return numbers.choices(TOKEN_IDS, k=count)
    return " " + " ".join(numbers.choices(WORDS, k=count))


class Dialogue(ABC):
    """The prompt of a conversation, which grows by messages and answers."""

    @abstractmethod
    def add(self, role: str, content: Piece) -> None:
        """Appends a message."""

    @abstractmethod
    def body(self) -> dict[str, Any]:
        """Returns the fields of a request that have the prompt."""


class _Chat(Dialogue):
    def __init__(self) -> None:
        self._messages: list[dict[str, str]] = []

    def add(self, role: str, content: Piece) -> None:
        assert isinstance(content, str)
        self._messages.append({"role": role, "content": content})

    def body(self) -> dict[str, Any]:
        return {"messages": self._messages}


class _Text(Dialogue):
    def __init__(self) -> None:
        self._text = ""

    def add(self, role: str, content: Piece) -> None:
        assert isinstance(content, str)
        self._text += content

    def body(self) -> dict[str, Any]:
        return {"prompt": self._text}


class _Tokens(Dialogue):
    def __init__(self) -> None:
        self._tokens: list[int] = []

    def add(self, role: str, content: Piece) -> None:
        assert isinstance(content, list)
        self._tokens += content

    def body(self) -> dict[str, Any]:
        return {"prompt": self._tokens, "return_token_ids": True}


def new_dialogue(api: Api) -> Dialogue:
    kinds: dict[Api, Callable[[], Dialogue]] = {
        Api.CHAT: _Chat,
        Api.COMPLETIONS: _Text,
        Api.TOKENS: _Tokens,
    }
    return kinds[api]()

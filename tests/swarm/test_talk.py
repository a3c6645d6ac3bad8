"""What `petalnode chat` makes of its options, over servers in memory."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import trio

from petalnode.crypto.identity import Identity
from petalnode.node.cli.conversation.client_parts import ClientParts
from petalnode.node.cli.conversation.options import ChatOptions
from petalnode.node.cli.conversation.talk import OpenChat, chat_in
from petalnode.node.cli.output import Output
from petalnode.node.client.chat import SavedChat, held_chat
from petalnode.node.client.generation import conversation as conversations
from petalnode.node.errors import BadInput
from petalnode.node.models import ModelFolder, resolve
from petalnode.node.swarm.config import SwarmConfig
from tests.peft_adapters import save_prompt
from tests.swarm.conftest import CONTEXT, ServedInMemory
from tests.swarm.processes import environment

ONE = ChatOptions(prompt="one two", max_new_tokens=6, yes=True)
TYPED = ChatOptions(max_new_tokens=6, temperature=0.0)


class Opened(conversations.Conversation):
    """Notes with what each conversation was opened, and what was asked in it."""

    opened: ClassVar[list[dict[str, Any]]] = []
    asked: ClassVar[list[list[int]]] = []

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.opened.append(options)

    async def answer(self, tokens: Any, *arguments: Any, **options: Any) -> Any:
        self.asked.append(list(tokens))
        return await super().answer(tokens, *arguments, **options)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is looked for elsewhere, and kept elsewhere."""
    monkeypatch.setattr(conversations, "Conversation", Opened)
    Opened.opened.clear()
    Opened.asked.clear()
    for name, value in environment(tmp_path / "home").items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def other(served_in_memory: ServedInMemory) -> Path:
    """Another model that is served."""
    folder = served_in_memory.models / "other-llama"
    served_in_memory.serve(folder, "0:6")
    return folder


def chat(
    served: ServedInMemory,
    options: ChatOptions,
    kept: OpenChat | None = None,
    parts: ClientParts | None = None,
    model: str = "tiny-llama",
    **named: Any,
) -> None:
    async def run() -> None:
        identity = Identity.generate() if kept is None else kept.saved.identity
        config = SwarmConfig(identity=identity, listen=(), peers=(), serve_dht=False)
        folder = resolve(str(served.models / model), need="client", offline=True)
        async with served.swarm.network.open_swarm(config) as node:
            node.host.connections = lambda peer_id: []
            with_json = Output(options.prompt is not None)
            await chat_in(node, folder, options, with_json, kept, parts=parts, **named)

    served.swarm.call(run)


def test_one_question_reserves_for_one_answer_only(
    served_in_memory: ServedInMemory, capsys: pytest.CaptureFixture[str]
) -> None:
    chat(served_in_memory, ONE)
    answer = json.loads(capsys.readouterr().out)
    assert answer["tokens"] == 6 and [hop["blocks"] for hop in answer["route"]] == [[0, 2], [2, 4], [4, 6]]
    assert Opened.opened[0]["max_length"] == len(Opened.asked[0]) + 6
    chat(served_in_memory, replace(ONE, system="short"))
    assert json.loads(capsys.readouterr().out)["tokens"] == 6
    assert len(Opened.asked[1]) == len(Opened.asked[0]) + len("s:short\n")


def test_kept_session_is_resumed_with_servers_caches(
    served_in_memory: ServedInMemory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reused = []
    for prompt, caches in (("one", True), ("two", True), ("three", False)):
        file = tmp_path / "chat.json"
        with held_chat(file) as saved:
            chat(served_in_memory, replace(ONE, prompt=prompt), OpenChat(saved, file, caches))
        reused.append(json.loads(capsys.readouterr().out)["reused"])
    assert reused[0] == 0 < reused[1] and reused[2] == 0
    saved = SavedChat.read(tmp_path / "chat.json")
    assert saved.dialogue.questions == 3 and saved.model == str(served_in_memory.folder)
    with pytest.raises(BadInput, match="held with another model"):
        chat(served_in_memory, ONE, OpenChat(saved, tmp_path / "chat.json", True), model="other-llama")


def test_what_is_loaded_already_is_not_loaded_again(
    served_in_memory: ServedInMemory,
) -> None:
    loaded: list[Path] = []

    class Noting(ClientParts):
        async def load(self, folder: ModelFolder) -> None:
            loaded.append(folder.path)
            await super().load(folder)

    parts = Noting(None)
    trio.run(parts.load, resolve(str(served_in_memory.folder), need="client", offline=True))
    chat(served_in_memory, ONE, parts=parts)
    assert loaded == [served_in_memory.folder]


def test_soft_prompt_takes_its_part_of_context(
    served_in_memory: ServedInMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = save_prompt(served_in_memory.folder, tmp_path / "soft", tokens=5)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    for given, room in ((None, CONTEXT), (str(adapter), CONTEXT - 5)):
        chat(served_in_memory, replace(TYPED, adapter=given))
        assert Opened.opened[-1]["max_length"] == room


def test_who_pipes_questions_is_told_of_strangers(
    served_in_memory: ServedInMemory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    chat(served_in_memory, TYPED)
    said = capsys.readouterr()
    assert said.err.count("3 servers of people whom you have not named") == 1
    assert "Go on?" not in said.out and len(Opened.asked) == 2
    chat(served_in_memory, TYPED, private=True)
    assert "servers of people" not in capsys.readouterr().err


@pytest.mark.parametrize("is_kept", [True, False])
def test_another_model_goes_on_with_what_was_said(
    served_in_memory: ServedInMemory,
    other: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_kept: bool,
) -> None:
    lines = ("/set max_new_tokens 7", "one", "/model nobody/has-it", "two", f"/model {other}", "three")
    lines += ("/system be brief", "/model", "/set", "/quit")
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join([*lines, ""])))
    file = tmp_path / "kept.json"
    with held_chat(file) as saved:
        kept = OpenChat(saved, file, False) if is_kept else None
        chat(served_in_memory, replace(TYPED, yes=True, system="short"), kept)
    said = capsys.readouterr()
    assert "nobody/has-it" in said.err and "Traceback" not in said.err
    assert "served in this swarm:" in said.out and "other-llama" in said.out
    assert said.out.count("(max_new_tokens 7, ") == 2  # when it was set, and of the other model
    first, second, third = map(len, Opened.asked)  # each prompt has all that was said before
    assert second > first + 6 and third > second + 6
    if is_kept:
        written = SavedChat.read(file)
        assert written.dialogue.questions == 3 and written.model == str(other)
        assert written.dialogue.turns[0].content == "short"


@pytest.mark.parametrize(
    ("content", "says"), [(b"no picture", "no picture that can be opened"), (None, "cannot read the picture")]
)
def test_picture_is_looked_at_before_anything_is_asked(
    served_in_memory: ServedInMemory, tmp_path: Path, content: bytes | None, says: str
) -> None:
    file = tmp_path / "cat.png"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(BadInput) as caught:
        chat(served_in_memory, replace(ONE, image=[file]))
    assert says in str(caught.value) and str(file) in str(caught.value) and not Opened.asked


def test_drafts_come_from_text_or_model_or_none(served_in_memory: ServedInMemory) -> None:
    for draft, named in (("auto", None), ("none", None), (str(served_in_memory.folder), str(served_in_memory.folder))):
        options = replace(ONE, draft=draft)
        assert options.draft_model == named
        chat(served_in_memory, options)
    auto, none, model = (opened["drafts"] for opened in Opened.opened)
    assert (auto, none) == (True, False) and model.__class__.__name__ == "DraftModel"

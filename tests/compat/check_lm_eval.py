"""lm-eval's `local-completions` against the API, compared with its `hf` backend: `make compat`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import lm_eval
import pytest
from lm_eval.tasks import TaskManager

from petalnode.node.models import resolve
from petalnode.node.testing.memory_servers import memory_swarm
from tests.memory_api import memory_api

CAPITALS: Final = {
    "France": "Paris",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Japan": "Tokyo",
    "Egypt": "Cairo",
    "Norway": "Oslo",
    "Austria": "Vienna",
    "Greece": "Athens",
}
CHOICES: Final = """
task: capitals
output_type: multiple_choice
doc_to_text: "The capital of {{country}} is"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
"""
ROLLING: Final = """
task: sentences
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "The capital of {{country}} is {{choices[answer]}}."
metric_list: [{metric: word_perplexity}]
"""
GENERATED: Final = """
task: answers
output_type: generate_until
doc_to_text: "The capital of {{country}} is"
doc_to_target: " {{choices[answer]}}"
generation_kwargs: {until: ["."], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match}]
"""
TOLERANCE: Final = 1e-4
"""Of a log-likelihood, which is a sum over tokens; both sides compute in float32, in other orders."""


@contextmanager
def default_model(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """The default model, on three servers in memory."""
    folder = tmp_path / "smollm2"
    folder.mkdir()
    for file in resolve("smollm2", need="all").path.iterdir():
        (folder / file.name).symlink_to(file)
    with memory_swarm() as swarm:
        started = [swarm.start(folder, span) for span in ("0:10", "10:20", "20:30")]
        for server in started:
            assert server.ready
        with memory_api(swarm, folder) as running:
            yield folder, running.url


@pytest.fixture(scope="module", params=["tiny", "default"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A folder, and the URL of an API that serves it."""
    if request.param == "tiny":
        yield request.getfixturevalue("api_model"), request.getfixturevalue("api").url
        return
    with default_model(tmp_path_factory.mktemp("model")) as opened:
        yield opened


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> TaskManager:
    folder = tmp_path_factory.mktemp("tasks")
    cities = list(CAPITALS.values())
    asked = [
        {"country": country, "choices": cities[index // 2 :] + cities[: index // 2], "answer": index - index // 2}
        for index, country in enumerate(CAPITALS)
    ]
    data = folder / "capitals.jsonl"
    data.write_text("".join(f"{json.dumps(one)}\n" for one in asked))
    common = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
    for name, text in {"capitals": CHOICES, "sentences": ROLLING, "answers": GENERATED}.items():
        (folder / f"{name}.yaml").write_text(common + text)
    return TaskManager(include_path=str(folder), include_defaults=False)


def answers(tasks: TaskManager, task: str, backend: str, **model: Any) -> list[Any]:
    """What the backend has answered to the requests of a task, in the task's order."""
    found: Any = lm_eval.simple_evaluate(
        model=backend, model_args=model, tasks=[task], task_manager=tasks, log_samples=True, bootstrap_iters=0
    )
    samples: list[Mapping[str, Any]] = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
    return [answer for sample in samples for answer in sample["filtered_resps"]]


def both(tasks: TaskManager, task: str, model: tuple[Path, str]) -> tuple[list[Any], list[Any]]:
    folder, url = model
    local = answers(tasks, task, "hf", pretrained=str(folder), dtype="float32", device="cpu", batch_size=1)
    options = {"tokenizer_backend": "huggingface", "tokenizer": str(folder), "num_concurrent": 4, "max_length": 1024}
    asked = answers(
        tasks, task, "local-completions", model=folder.name, base_url=f"{url}/v1/completions", max_retries=1, **options
    )
    assert len(local) == len(asked)
    return local, asked


def test_choices_are_as_likely(tasks: TaskManager, model: tuple[Path, str]) -> None:
    local, asked = both(tasks, "capitals", model)
    assert len(local) == len(CAPITALS) ** 2
    difference = max(abs(one[0] - other[0]) for one, other in zip(local, asked, strict=True))
    print(f"\n{model[0].name}: the largest difference of {len(local)} log-likelihoods is {difference:.2g}")
    assert difference < TOLERANCE
    assert [one[1] for one in local] == [other[1] for other in asked]  # whether greedy decoding says it


def test_texts_are_as_likely(tasks: TaskManager, model: tuple[Path, str]) -> None:
    local, asked = both(tasks, "sentences", model)
    difference = max(abs(one - other) for one, other in zip(local, asked, strict=True))
    print(f"\n{model[0].name}: the largest difference of {len(local)} rolling log-likelihoods is {difference:.2g}")
    assert difference < TOLERANCE


def test_answers_are_the_same(tasks: TaskManager, model: tuple[Path, str]) -> None:
    local, asked = both(tasks, "answers", model)
    assert local == asked

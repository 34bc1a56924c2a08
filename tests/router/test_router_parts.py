"""The router's parts on their own."""

from __future__ import annotations

import itertools
from typing import Annotated

import pytest
from pydantic import Field

import router
from engine.protocol import BadRequest, TokenLogprob
from router.api.openai.formats import ChatFormat, CompletionFormat
from router.base.environment import child_environment, drop_service_links
from router.base.errors import Conflict, NotFound
from router.base.request import Chunk
from router.cli.options import read_params
from router.model.chat_template import ChatTemplate
from router.model.served import ServedModel
from router.rollout.catalog import Catalog
from router.rollout.revisions import Revisions
from router.strategy.definition import strategy
from router.supervisor import Pool, as_arguments
from router.supervisor.pools import engine_processes
from router.telemetry.receipts import Receipt, Receipts


def test_the_public_names_are_pinned():
    assert router.__all__ == [
        "Chunk", "Cluster", "Engine", "Lease", "Mirror", "Pool", "Request", "Strategy", "strategy",
    ]  # fmt: skip


async def one(request, cluster, *, ratio: Annotated[float, Field(ge=0, le=1)] = 0.5):
    """Help."""
    yield Chunk()


def test_params_are_validated_from_annotations():
    bound = strategy(one).bind({"ratio": 1})
    assert bound.params == {"ratio": 1.0}
    assert strategy(one).bind({}).params == {"ratio": 0.5}
    for bad in ({"ratio": 2}, {"ratio": "x"}, {"other": 1}):
        with pytest.raises(BadRequest) as error:
            strategy(one).bind(bad)
        assert error.value.param == f"params.{next(iter(bad))}"
    described = strategy(one).describe()
    assert (described["name"], described["doc"]) == ("one", "Help.")
    assert described["params"]["ratio"]["maximum"] == 1


def test_functions_with_a_wrong_signature_are_no_strategies():
    async def returns(request, cluster): ...

    async def too_few(request):
        yield

    async def no_default(request, cluster, *, x: int):
        yield

    async def positional(request, cluster, x=1):
        yield

    async def stars(request, cluster, **params):
        yield

    async def bad_default(request, cluster, *, x: int = "no"):
        yield

    for function in (returns, too_few, no_default, positional, stars, bad_default):
        with pytest.raises(TypeError, match=function.__name__):
            strategy(function)


def test_revisions_swap_roll_back_and_end_with_their_last_request():
    bound = strategy(one).bind({})
    revisions = Revisions(bound)
    first = revisions.enter()
    second = revisions.activate(bound, if_generation=1)
    assert (second.number, revisions.active) == (2, second)
    with pytest.raises(Conflict):
        revisions.activate(bound, if_generation=1)
    assert revisions.live() == [second, first]
    revisions.leave(first)
    assert revisions.live() == [second]
    assert revisions.rollback().number == 3
    with pytest.raises(Conflict):
        revisions.rollback()


def test_the_history_of_revisions_is_bounded():
    revisions = Revisions(strategy(one).bind({}), history=3)
    for _ in range(10):
        revisions.activate(strategy(one).bind({}))
    for _ in range(3):
        revisions.rollback()
    with pytest.raises(Conflict):
        revisions.rollback()


def test_receipts_are_bounded():
    receipts = Receipts(2)
    for id in "abcb":
        receipts.add(Receipt(id, 1, "s", {}, 0, 0))
    assert receipts["b"].id == "b"
    with pytest.raises(NotFound):
        receipts["a"]


def test_chat_templates_render_as_transformers_does():
    source = (
        "{{ bos_token }}{% for m in messages %}\n"
        "    {% if m.role == 'x' %}{% continue %}{% endif %}\n"
        "{{ m.content }}{{ eos_token }}{% endfor %}{{ {'a': '<'} | tojson }}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
    messages = [{"role": "x", "content": "no"}, {"role": "user", "content": "hi"}]
    assert template.render(messages) == '<s>hi</s>{"a": "<"}>'
    assert template.render(messages, add_generation_prompt=False) == '<s>hi</s>{"a": "<"}'


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no system role') }}",
        "{{ messages.nothing.at_all }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
    ],
)
def test_templates_are_sandboxed_and_their_errors_are_client_errors(source):
    with pytest.raises(BadRequest):
        ChatTemplate(source, bos_token=None, eos_token=None).render([])


def test_bos_is_added_once(fake):
    model = ServedModel(fake("a").info.model_copy(update={"bos_token": "w9", "add_bos": True}))
    assert model.encode("w1") == [9, 1]
    assert model.encode("w9 w1") == [9, 1]
    assert model.encode_chat([{"role": "user", "content": "w1"}]) == [1]
    assert model.encode("w1", special=False) == [1]


def logprob(token: str) -> dict:
    top = [TokenLogprob(token_id=1, token="b", bytes=[98], logprob=-2.0)]
    return TokenLogprob(
        token_id=0, token=token, bytes=[97], logprob=-1.0, top=top
    ).model_dump()  # fmt: skip


def test_logprobs_in_both_shapes():
    options = {"with_logprobs": True, "with_ids": False, "with_usage": False}
    completion = CompletionFormat("x", "m", "fp", **options)
    first = completion.logprobs(0, [logprob("aa")])
    assert first["top_logprobs"] == [{"aa": -1.0, "b": -2.0}]
    assert completion.logprobs(0, [logprob("a"), logprob("a")])["text_offset"] == [1, 2]
    chat = ChatFormat("x", "m", "fp", **options).logprobs(0, [logprob("a")])
    assert chat["content"][0]["top_logprobs"] == [{"token": "b", "logprob": -2.0, "bytes": [98]}]


def test_chunks_that_arrive_together_become_one():
    chunk = Chunk(token_ids=[1], text="a", begin=0, logprobs=[{"token": "a"}])
    chunk.extend(Chunk(token_ids=[2], text="b", logprobs=[{"token": "b"}]))
    chunk.extend(Chunk(token_ids=[3], finish_reason="stop", stop_reason="c"))
    assert chunk == Chunk(
        [1, 2, 3], "ab", 0, [{"token": "a"}, {"token": "b"}], "stop", "c"
    )  # fmt: skip


def test_the_catalog_has_the_built_in_strategies(tmp_path):
    catalog = Catalog()
    names = {found["name"] for found in catalog.describe()}
    assert {"balanced", "data_parallel", "prefill_decode"} <= names
    with pytest.raises(NotFound, match="balanced"):
        catalog["nothing"]
    file = tmp_path / "any_name.py"
    source = (
        "from router import strategy\n\n@strategy\nasync def {}(request, cluster):\n    yield\n"
    )
    file.write_text(source.format("mine"))
    assert catalog.find(str(file)).name == "mine"
    assert catalog["mine"].name == "mine"
    file.write_text(source.format("balanced"))
    with pytest.raises(Conflict):
        catalog.find(str(file))
    with pytest.raises(BadRequest):
        catalog.find(str(tmp_path / "absent.py"))


def test_service_links_and_flag_variables_are_dropped_from_the_environment(monkeypatch):
    monkeypatch.setenv("MICROSERVE_ENGINE_PORT", "tcp://10.0.0.1:8100")
    monkeypatch.setenv("MICROSERVE_UP_PORT", "9")
    monkeypatch.setenv("MICROSERVE_SECRET", "s")
    drop_service_links()
    env = child_environment()
    assert "MICROSERVE_ENGINE_PORT" not in env
    assert "MICROSERVE_UP_PORT" not in env
    assert env["MICROSERVE_SECRET"] == "s"


def test_params_are_parsed_and_options_rendered_as_flags():
    assert read_params(["a=1", "b=x", "c=true"]) == {"a": 1, "b": "x", "c": True}
    assert as_arguments({"page_size": 16, "yes": True, "no": False}) == [
        "--page-size", "16", "--yes",
    ]  # fmt: skip


def test_cores_are_divided_among_engines(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2})

    def given(count: int, **flags: int) -> list[list[str]]:
        return [
            [word for word in each.arguments if word.startswith(("--cpus", "--threads"))]
            + [
                value
                for word, value in itertools.pairwise(each.arguments)
                if word in ("--cpus", "--threads")
            ]
            for each in engine_processes([Pool(count=count, flags=flags)])
        ]

    assert given(2) == [["--cpus", "--threads", "0", "1"], ["--cpus", "--threads", "1,2", "2"]]
    assert given(4) == [["--threads", "1"]] * 4
    assert given(2, threads=2) == [["--threads", "2"]] * 2

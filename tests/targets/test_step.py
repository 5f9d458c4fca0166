"""The compiled step says what the plain step says, and is refused where it is not to be trusted."""

import copy
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from conftest import PAYS, tiny_model
from contracts.parties import Oracle, Proposer

from benchmarks.families import continued, tiny
from outrider import fast as fast_paths
from outrider import machine
from outrider.decoding.draft import Draft
from outrider.decoding.state import Request
from outrider.drafters.small_model import Config, SmallModel
from outrider.fast import NotCompiled, compile_passes
from outrider.fast.packages import background, build
from outrider.fast.packages import package as package_module
from outrider.fast.packages.key import fingerprint, values_of
from outrider.generation import generate, serve, stream
from outrider.kernels import prepacked
from outrider.sampling.settings import Sampling
from outrider.targets.hf import chunks
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target

V = 64
COUNTS = (30, 17, 23, 9, 30)


def model_of(**sizes: object):
    return tiny_model(21, num_hidden_layers=2, **sizes)


@pytest.fixture(scope="module")
def fast() -> TransformersTarget:
    target = load_target(model_of())
    target.compile()  # another worker may have done so
    return target


@pytest.fixture(scope="module")
def slow(fast: TransformersTarget) -> TransformersTarget:
    """The same model, plain."""
    target = load_target(model_of(), compile=False)
    assert target.step.graph is None
    return target


@pytest.fixture
def package(fast: TransformersTarget, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache folder of this test's own that holds the graph."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    fast_paths.folder().mkdir(parents=True)
    return Path(shutil.copy(fast.step.path, fast_paths.folder()))


@contextmanager
def counted(target: TransformersTarget) -> Iterator[list[bool]]:
    """For every pass through the graph, whether it had several rows."""
    calls: list[bool] = []
    graph = target.step.graph
    if graph is None:
        yield calls
        return
    forward = graph.forward
    with patch.object(graph, "forward", lambda tokens, *more: calls.append(len(tokens) > 1) or forward(tokens, *more)):
        yield calls


class Guesses(Proposer):
    """A ragged draft of ids that are mostly wrong, as cheap ones are: a tree, or a chain."""

    def __init__(self, vocabulary: int, branches: bool):
        self.vocabulary, self.parents = vocabulary, torch.tensor([-1, -1, 0, 1] if branches else [-1, 0, 1, 2])

    def propose(self, memory, state, budget):
        shape = (len(state.rows), 4)
        tokens = torch.randint(self.vocabulary, shape, generator=memory).to(state.device)
        sizes = torch.minimum(budget, torch.tensor([1 + row % 4 for row in state.rows]))
        return Draft(tokens, self.parents.expand(shape).to(state.device), sizes)


def prompts_of(vocabulary: int) -> list[list[int]]:
    """Of unequal length, one beyond the windows of small families."""
    noise = torch.Generator().manual_seed(1)
    return [torch.randint(vocabulary, (length,), generator=noise).tolist() for length in (6, 1, 31, 3, 9)]


def written(target: TransformersTarget, drafter, slots: int) -> list[list[int]]:
    """Continuations of these prompts; more of them than slots, so that slots are used again."""
    prompts = prompts_of(target.spec.vocabulary)
    texts: list[list[int]] = [[] for _ in prompts]
    requests = [Request(prompt, count, Sampling()) for prompt, count in zip(prompts, COUNTS, strict=True)]
    for progress in serve(target, requests, drafter, slots=slots):
        texts[progress.request] += progress.tokens
    return texts


def agree(fast: TransformersTarget, slow: TransformersTarget, modes: tuple[bool, ...] = (False, True)) -> None:
    """Their greedy texts are equal with every kind of draft, and those of `fast` came from its graph."""
    vocabulary = slow.spec.vocabulary
    plain = written(slow, None, 1)
    texts = [prompt + text for prompt, text in zip(prompts_of(vocabulary), plain, strict=True)]
    oracle = Oracle(texts, vocabulary, true_is_eldest=slow.spec.mode == "chain")
    for several in modes:
        for drafter in (None, Guesses(vocabulary, False), Guesses(vocabulary, True), oracle):
            with counted(fast) as calls:
                assert written(fast, drafter, 3 if several else 1) == plain
            assert several in calls


def passes(target: TransformersTarget, rows: list[int], drafts: list[Draft], length: int = 60):
    """Scores of these drafts after text of unequal length in these slots of four."""
    noise = torch.Generator().manual_seed(4)
    tokens = torch.randint(target.spec.vocabulary, (4, 40), generator=noise)
    cache = target.allocate(4, length)
    with patch.object(target.step, "reads", return_value=False):  # not to be counted
        target.prefill(cache, [0, 1, 2, 3], tokens, [40, 33, 36, 7])
    anchor = torch.tensor([5, 6, 7, 8])[: len(rows)]
    return [target.verify(cache, rows, anchor, draft, (0, 1)) for draft in drafts]


def drafts_for(rows: int, vocabulary: int, is_tree: bool = True) -> list[Draft]:
    """No draft, chains of one and of six, a tree."""
    noise = torch.Generator().manual_seed(6)
    tokens = torch.randint(vocabulary, (rows, 6), generator=noise)
    sizes = torch.full((rows,), 6)
    tree = Draft(tokens, torch.tensor([-1, 0, -1, 0, 1, 2]).expand_as(tokens), sizes)
    chains = [Draft.empty(rows, "cpu"), Draft.chain(tokens[:, :1], torch.ones_like(sizes)), Draft.chain(tokens, sizes)]
    return [*chains, tree] if is_tree else chains


def close(fast: TransformersTarget, slow: TransformersTarget, rows: list[int], tolerance: float) -> None:
    drafts = drafts_for(len(rows), slow.spec.vocabulary, slow.spec.mode == "tree")
    with counted(fast) as calls:
        found = passes(fast, rows, drafts)
    assert calls == [len(rows) > 1] * len(drafts)
    for mine, plain in zip(found, passes(slow, rows, drafts), strict=True):
        for name in ("logits", "hidden", "taps"):
            ours, theirs = getattr(mine, name), getattr(plain, name)
            assert ours.shape == theirs.shape
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, check_dtype=False)
        assert torch.equal(mine.choice, mine.logits.argmax(-1))


def test_greedy_text_is_the_plain_path_s(fast, slow):
    """Catches masks, depths, columns or slots that the graph reads otherwise; slots are ragged and used again."""
    agree(fast, slow)


@pytest.mark.parametrize("rows", [[0], [3], [1, 2], [0, 1, 2, 3], [2, 1], [0, 2, 1, 3], [0, 1, 3]], ids=str)
def test_scores_are_the_plain_path_s(rows, fast, slow):
    """Catches a tap off by one, a hidden state before the norm, a choice of another row."""
    close(fast, slow, rows, 1e-5)  # the family computes its norms in float32, whatever its type


def test_a_pass_may_end_where_the_cache_ends(fast, slow):
    """Catches a write behind the cache's last column, and a pass that is sent to the plain path for nothing."""
    six, none = drafts_for(1, V)[2], Draft.empty(1, "cpu")
    for length, draft in ((47, six), (41, none)):
        with counted(fast) as calls:
            [mine] = passes(fast, [0], [draft], length)
        assert calls == [False]
        [plain] = passes(slow, [0], [draft], length)
        torch.testing.assert_close(mine.logits, plain.logits, rtol=1e-5, atol=1e-5)


def test_a_prompt_is_read_by_the_graph(fast, slow):
    """Catches a prompt whose keys, last logits or taps are others than the plain path's, in any of its chunks."""
    text = torch.randint(V, (1, 45), generator=torch.Generator().manual_seed(9))
    outputs = []
    for target in (fast, slow):
        cache = target.allocate(2, 60)
        with counted(target) as calls:
            scores = [target.prefill(cache, [1], text[:, :30], [30], (0, 1))]
            scores.append(target.prefill(cache, [1], text[:, 30:], [12], (1,)))
        assert calls == [False, False] * (target is fast)
        assert cache.lengths == [0, 42]
        states = [buffer for layer in cache.layers for buffer in cache.cached(layer, [1])]
        outputs.append([*states, *(part for own in scores for part in (own.logits, own.hidden, own.taps))])
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)


def test_the_first_chunk_passes_compiled_where_the_package_was_checked_before(fast):
    """Catches prompts read by plain passes in every process but the first, which compares and times the package."""
    again = load_target(model_of())
    assert again.step.path == fast.step.path
    with counted(again) as calls:
        again.prefill(again.allocate(1, 40), [0], torch.tensor([[3, 4, 5]]), [3])
    assert calls == [False]


def test_slots_of_unequal_length_are_read_with_little_padding(fast, slow, monkeypatch):
    """Catches short prompts that are padded to a long one, which a CPU pays for."""
    lengths = [45, 8, 40, 5, 6]
    text = torch.randint(V, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(9))
    monkeypatch.setattr(chunks, "FULL", 50)
    for target in (fast, slow):
        cache, read = target.allocate(len(lengths), 60), []
        monkeypatch.setattr(cache, "open", lambda rows, width, real=cache.open, read=read, **more: (
            read.append((list(rows), width)), real(rows, width, **more)))  # fmt: skip
        whole = target.prefill(cache, range(len(lengths)), text, lengths, (0, 1))
        assert read == [([0], 45), ([1], 8), ([2], 40), ([3, 4], 6)]
        assert cache.lengths == lengths
        for row, length in enumerate(lengths):
            alone = target.prefill(target.allocate(1, 60), [0], text[row : row + 1, :length], [length], (0, 1))
            beside = whole.logits[row], whole.hidden[row, :length], whole.taps[row, :length]
            torch.testing.assert_close(beside, (alone.logits[0], alone.hidden[0], alone.taps[0]), rtol=1e-5, atol=1e-5)


def test_a_text_goes_on_to_the_end_of_the_context(fast, slow):
    """Catches positions of padding behind the context, where the target's own text has its last tokens."""
    prompts = [[3] * (slow.spec.context - 12), [3, 4, 5]]
    for drafter in (None, Guesses(V, True)):
        found, plain = (generate(target, prompts, drafter, max_new_tokens=20) for target in (fast, slow))
        assert [generation.tokens for generation in found] == [generation.tokens for generation in plain]
        assert found[0].finish_reason == plain[0].finish_reason == "context"


def test_a_small_model_drafts_with_its_compiled_step(fast, slow):
    """Catches a drafter's `compile_passes` that compiles nothing of its own."""
    drafter = SmallModel(fast, Config(length=3))
    assert compile_passes(drafter) == 0
    with counted(fast) as calls:
        assert written(slow, drafter, 1) == written(slow, None, 1)
    assert calls


def test_a_second_load_finds_the_package(fast, monkeypatch):
    """Catches a key that changes from one load to the next, and `compile=False` that is not obeyed."""
    monkeypatch.setattr(fast_paths, "build_package", lambda *_: pytest.fail("compiled again"))
    for choice in (None, True):
        target = load_target(model_of(), compile=choice)
        assert target.step.path == fast.step.path
        assert target.compile() == 0
    assert load_target(model_of(), compile=False).step.graph is None


def test_torchs_own_call_of_a_package_is_the_same(fast, slow, monkeypatch, caplog):
    """Where there is no compiler that could make our call, which gives the interpreter's lock back."""
    prompts, ours = prompts_of(V), fast.step.graph.package
    assert ours._operators is not None
    monkeypatch.setattr(package_module, "operators", lambda: None)
    target = load_target(model_of())
    assert target.step.graph.package._operators is None
    assert sorted(target.step.graph.package.names) == sorted(ours.names)
    assert target.step.graph.package.has_weights == ours.has_weights
    found = [generate(each, prompts, max_new_tokens=9) for each in (fast, target, slow)]
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
def test_a_package_without_weights_serves_every_model_of_its_shape_by_our_kernels(monkeypatch, tmp_path):
    """Catches a graph that holds the plain products, products that are others than those outside."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr(machine, "fastest", lambda question, ways, margin=1.1: "panels")
    first, other = (load_target(tiny_model(seed, num_hidden_layers=1).float(), compile=False) for seed in (21, 22))
    assert prepacked.way_of(first.model) == "panels"
    assert first.compile() > 0
    assert other.compile() == 0
    assert other.step.path == first.step.path
    kept, text = first.step._pass(1, 8)
    given = first.step._arguments(text, kept, None, ())
    with torch.inference_mode():
        torch.testing.assert_close(first.step.graph.forward(*given)[0], first.step.plain()(*given)[0])
    with zipfile.ZipFile(first.step.path) as archive:
        [library] = [archive.read(name) for name in archive.namelist() if name.endswith(".so")]
    assert b"aoti_torch_cpu_multiply" in library and b"aoti_torch_cpu_attend" in library

    def agrees(target: TransformersTarget) -> None:
        plain = load_target(copy.deepcopy(target.model), compile=False)
        target.refresh()  # which takes the graph anew where weights have changed
        with counted(target) as calls:
            assert written(target, None, 2) == written(plain, None, 2)
        assert calls

    agrees(first)
    agrees(other)
    with torch.no_grad():
        for weight in first.model.parameters():
            weight.copy_(weight.flip(0))
    assert first.compile() == 0
    agrees(first)


def test_another_weight_thread_or_line_of_code_is_another_key(fast, monkeypatch):
    """Catches a package that is taken for what it was not made from."""
    key = lambda model=fast.model: fingerprint(model, *fast.step.settings())
    keys = {key(), key(model_of(intermediate_size=96)), key(model_of(tie_word_embeddings=True))}
    assert fast.step.path.stem == f"step-{key()}-{values_of(fast.model)}", "it holds the weights"
    other = model_of()
    with torch.no_grad():
        other.model.layers[1].mlp.down_proj.weight[-1, -1] += 1e-12
    assert values_of(other) != values_of(fast.model)
    with patch("torch.get_num_threads", lambda: 7):
        keys.add(key())
    with patch("outrider.fast.passes.compiled.code", lambda *modules: [b"another line" for _ in modules]):
        keys.add(key())
    with patch.object(fast.model.config, "rms_norm_eps", 0.5):
        keys.add(key())
    turned = model_of()
    turned.model.rotary_emb.inv_freq.mul_(0.5)  # inductor writes short vectors into the package
    keys.add(key(turned))
    assert len(keys) == 7


def test_weights_that_were_one_and_are_two_are_another_key(monkeypatch):
    """Catches a package that reads the embedding where the output layer has become another."""
    target = load_target(model_of(tie_word_embeddings=True), compile=False)
    before = target.step._path(holds_weights=False)
    target.model.lm_head.weight = torch.nn.Parameter(-target.model.lm_head.weight.data)
    assert target.refresh() == ["lm_head.weight"]
    assert target.step._path(holds_weights=False) != before


def test_a_model_that_is_cast_after_its_steps_were_compiled_decodes_on(package):
    """Catches a cache of the former type of numbers, which attention refuses."""
    target = load_target(model_of())
    assert target.step.graph is not None
    generate(target, [3, 4], max_new_tokens=3)
    target.model.to(torch.float32)
    text = generate(target, [3, 4], max_new_tokens=9)[0]
    assert [3, 4, *text.tokens] == continued(model_of().to(torch.float32), [3, 4], 9)


@pytest.mark.parametrize(
    "damage", [lambda text: text[: len(text) // 2], lambda text: b"no package" * 99, lambda text: b""]
)
def test_a_damaged_package_is_refused(damage, package):
    """Catches a load that fails, or a whole program that ends, over a file that a full disk cut short."""
    package.write_bytes(damage(package.read_bytes()))
    target = load_target(model_of())
    assert target.step.graph is None
    with pytest.raises(NotCompiled, match="can't be loaded.*delete it"):
        target.compile()
    assert len(generate(target, [3, 4, 5], max_new_tokens=5)[0].tokens) == 5


@pytest.mark.parametrize("quicker", ["compiled", "plain"])
def test_a_graph_is_used_where_it_is_quicker_than_the_plain_path(quicker, fast, monkeypatch):
    """Catches a compiled step that is taken for the faster one on a machine where it is not."""
    monkeypatch.setattr(fast_paths.Compiled, "_pays", PAYS)
    asked, there = [], {*fast_paths.folder().glob("step-*")}

    def fastest(question, ways, margin=1.1):
        asked.append([question, *(way for way, run in ways().items() if run() is None)])
        return quicker

    monkeypatch.setattr(machine, "fastest", fastest)
    target = load_target(model_of())
    assert asked[0][1:] == ["compiled", "plain"]
    assert "a plain step" in asked[0][0]
    assert (target.step.graph is not None) == (quicker == "compiled")
    if quicker == "plain":
        with pytest.raises(NotCompiled, match="slower than plain ones on this machine"):
            target.compile()
    assert {*fast_paths.folder().glob("step-*")} == there, "it is not compiled again either way"


def test_a_graph_that_another_process_builds_is_taken_while_texts_go_on(fast, slow, package, monkeypatch, tmp_path):
    """Catches a server that stays at the plain pace until it is started again, and one that looks in every step."""
    elsewhere = tmp_path / "later"
    package.rename(elsewhere)
    target = load_target(model_of())
    looks, look = [], fast_paths.Compiled._on_disk
    monkeypatch.setattr(fast_paths.Compiled, "_on_disk", lambda step: looks.append(step) or look(step))
    target.step.await_graph()
    steps = stream(target, [3, 4], max_new_tokens=20)
    text = [token for _ in range(5) for token in next(steps).tokens]
    assert target.step.graph is None and len(looks) == 1
    elsewhere.rename(package)
    target.step.await_graph()
    text += [token for piece in steps for token in piece.tokens]
    assert target.step.graph is not None
    assert text == generate(slow, [3, 4], max_new_tokens=20)[0].tokens


def test_what_is_missing_is_built_once_in_the_background(fast, monkeypatch, tmp_path):
    """Catches two builds of one package, a build for a target that can't be compiled, and a step that never looks."""
    started: list[list[str]] = []
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr(background.subprocess, "Popen", lambda command, **_: started.append(command))
    target = load_target(model_of())
    background.build([target.step], "x", None, ["length=3"])
    assert not started, "OUTRIDER_COMPILE=off, as in all tests"
    monkeypatch.delenv("OUTRIDER_COMPILE")
    background.build([target.step], "x", None, ["length=3"])
    assert [command[-3:] for command in started] == [["--background", "--target=x", "--set=length=3"]]
    assert target.step._awaited_at is not None
    background.build([load_target(tiny("mamba2")).step], "x", None)
    monkeypatch.setattr(fast_paths.Compiled, "_on_disk", lambda step: tmp_path)
    background.build([target.step], "x", None)
    assert len(started) == 1


def test_a_model_that_could_not_be_compiled_is_not_tried_again_unless_asked(monkeypatch, tmp_path):
    """Catches a minute lost in every command, and a reason that stays when the compiler is there again."""
    tried: list[object] = []
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))

    def fail(*_: object) -> float:
        tried.append(0)
        raise NotCompiled("the disk is full")

    monkeypatch.setattr(fast_paths, "build_package", fail)
    monkeypatch.delenv("OUTRIDER_COMPILE")
    for _ in range(2):
        assert load_target(model_of(), compile="auto").step.graph is None
    assert len(tried) == 1
    with pytest.raises(NotCompiled, match="the disk is full"):
        load_target(model_of(), compile=True)
    assert len(tried) == 2


def test_without_a_compiler_all_stays_plain(fast, slow, monkeypatch, tmp_path):
    """Catches a machine without g++ on which nothing runs."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "has_compiler", lambda: False)
    target = load_target(model_of())
    with pytest.raises(NotCompiled, match=r"g\+\+"):
        target.compile()
    assert not list(tmp_path.rglob("*.pt2"))
    assert generate(target, [3, 4], max_new_tokens=9)[0].tokens == generate(slow, [3, 4], max_new_tokens=9)[0].tokens


@pytest.mark.parametrize("family", ["mamba2", "bloom"])
def test_a_family_that_cannot_be_traced_stays_plain(family, monkeypatch):
    """Catches a state that is not carried, and masks that are not made."""
    monkeypatch.setattr(fast_paths, "build_package", lambda *_: pytest.fail("tried"))
    target = load_target(tiny(family))
    with pytest.raises(NotCompiled, match="stay plain"):
        target.compile()
    assert len(generate(target, [3, 4], max_new_tokens=5)[0].tokens) == 5


def test_adapters_that_are_switched_are_decoded_by_plain_steps(monkeypatch):
    """Catches a graph that goes on with adapters that have been disabled, or without those that were enabled."""
    peft = pytest.importorskip("peft")
    monkeypatch.setattr(fast_paths, "build_package", lambda *_: pytest.fail("tried"))
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    target = load_target(peft.inject_adapter_in_model(config, model_of()).eval(), compile=False)
    with pytest.raises(NotCompiled, match="merge_and_unload"):
        target.compile()
    layers = [module for module in target.model.modules() if isinstance(module, peft.tuners.lora.LoraLayer)]
    for switched in (False, True):
        for layer in layers:
            layer.enable_adapters(switched)
        text = generate(target, [3, 4], max_new_tokens=9)[0]
        assert [3, 4, *text.tokens] == continued(target.model, [3, 4], 9)


def test_a_graph_of_other_weights_is_refused_and_deleted(fast, package, monkeypatch):
    """A planted fault: a package under this model's key that says something else."""
    monkeypatch.setattr(fast_paths, "values_of", lambda _: fast.step.path.stem.split("-")[-1])
    model = model_of()
    with torch.no_grad():
        model.lm_head.weight[7] += 1e-3
    target = load_target(model, compile=False)
    with pytest.raises(NotCompiled, match="from plain ones"):
        target.step.get(build=False)
    assert not package.exists()
    assert target.step.graph is None


def test_a_graph_is_not_used_after_its_weights_have_changed(fast, package):
    """Catches a model that goes on training and speaks with the weights it had."""
    target, changed = load_target(model_of()), model_of()
    assert target.step.graph is not None
    texts = lambda of: generate(of, [3, 4], max_new_tokens=9)[0].tokens
    with torch.no_grad():
        target.model.lm_head.weight.neg_()
        changed.lm_head.weight.neg_()
    with counted(target) as calls:
        assert texts(target) == texts(load_target(changed, compile=False))
    assert not calls
    with pytest.raises(NotCompiled, match="there is no compiled step of this model"):
        target.step.get(build=False)
    with torch.no_grad():
        target.model.lm_head.weight.neg_()
    target.step.look()
    assert target.refresh() == ["lm_head.weight"]
    with counted(target) as calls:
        assert texts(target) == texts(fast)
    assert calls


def model_like(family: str):
    """A tiny model whose experts are computed in one call; transformers' default knows no float64."""
    model = tiny(family, "eager" if family == "gpt-oss" else "sdpa")
    if family == "gpt-oss":
        model.set_experts_implementation("batched_mm")
    return model


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "gpt2", "llama4-chunks", "gpt-oss"])
def test_a_family_is_compiled_and_equal(family):
    """Catches a window, a table of positions, shared keys or experts that are traced for one size only."""
    fast, slow = load_target(model_like(family)), load_target(model_like(family), compile=False)
    fast.compile()
    agree(fast, slow)
    for rows in ([0], [1, 2]):
        # all of gpt2 is float64
        close(fast, slow, rows, 1e-9 if family == "gpt2" else 1e-5)

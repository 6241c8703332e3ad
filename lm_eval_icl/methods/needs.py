"""Checks that a model can do what a method needs, with all refusals and warnings."""

from __future__ import annotations

from dataclasses import replace

from accelerate.utils.memory import should_reduce_batch_size
from transformers import PreTrainedModel

from lm_eval_icl.errors import InputError, Unsupported, log, one_line
from lm_eval_icl.inference.attention import Reading
from lm_eval_icl.inference.capabilities import Capabilities
from lm_eval_icl.inference.generation import GenerationSettings
from lm_eval_icl.inference.memory import Memory, read_causally
from lm_eval_icl.inference.scoring import score_packed, score_rows
from lm_eval_icl.inference.trials import tells_positions_apart
from lm_eval_icl.methods.base import Method
from lm_eval_icl.prompts.tokens import Context


def check(method: Method, model: PreTrainedModel, can: Capabilities) -> None:
    """Refuse a model that does not do what a method needs: `Unsupported`, as in all checks."""
    name = type(model).__name__
    attention = model.config._attn_implementation
    if can.no_memory and not method.is_ordinary(Context((0,), ((0,), (0,)))):
        raise Unsupported(
            f"{method.name} continues from a memory of the demonstrations, and {name} does not "
            f"continue from its cache ({can.no_memory}). icl works with this model."
        )
    ordinary = method.one_pass and not (
        method.needs_mask or method.needs_positions or method.memory_depends_on_query
    )
    if can.is_hybrid and not ordinary:
        raise Unsupported(
            f"{method.name} works on keys and values, and {name} keeps more than these (linear "
            "attention, a state space, a convolution or an indexer). icl works with this model."
        )
    if method.needs_mask and not can.obeys_mask:
        raise Unsupported(
            f"{method.name} hides tokens from each other, which {name} "
            f"(attn_implementation={attention}) does not "
            "obey: use another attn_implementation (sdpa, eager) or another model."
        )
    shots = next((n for n in range(2, 1000) if not method.why_not(n)), 1)
    layouts = [layout for _, layout in method.passes(1, [2] * shots, 2, 2)]
    looks_ahead = any(layout.looks_ahead for layout in layouts)
    if method.needs_mask and looks_ahead and not can.sees_ahead:
        raise Unsupported(
            f"{method.name} lets tokens see later tokens, but in {name} they never do, whatever "
            f"the mask shows (attn_implementation={attention}). Use another model."
        )
    if method.needs_positions and not can.obeys_positions:
        raise Unsupported(
            f"{method.name} (positions={method.positions}) needs a model that obeys given "
            f"positions, and {name} has no positions to give: it counts tokens by itself, as "
            "models with ALiBi do. (InvICL, B.2, says that symmetric positions fit ALiBi; the "
            "model that it names, GPT-Neo, has learned positions, and runs here.)"
        )


def check_parts(method: Method, model: PreTrainedModel) -> None:
    """Check that all layers read a memory in parts.

    Changes in a part with a weight of almost 0 must have no effect.
    """
    query = (3, 4, 5)
    answers = [(6, 7), (8,)]

    def scores(memory: Memory) -> list[float]:
        packed = score_packed(model, [(memory, [(query, answer) for answer in answers])])
        rows = score_rows(model, memory, [(query, answers)])
        return [number for number, _ in (*packed, *rows)]

    def reads_in_parts() -> bool:
        memory = read_causally(model, [2, 3, 4, 5, 6, 7, 8, 9])
        unread = memory.divided(3, Reading(log_weight=-1e5))
        [part] = unread.parts
        changed = [(2 - keys, values.flip(2) + 1) for keys, values in part.layers]
        other = replace(unread, parts=(replace(part, layers=changed),))
        return scores(unread) == scores(other) and scores(unread) != scores(memory)

    name = type(model).__name__
    attention = model.config._attn_implementation
    why = f"attn_implementation={attention}: some layer does not use sdpa"
    try:
        if attention == "sdpa" and reads_in_parts():
            return
    except (ValueError, RuntimeError) as error:
        if should_reduce_batch_size(error):
            raise
        why = one_line(error)[:200]
    raise Unsupported(
        f"{method.name} computes attention to the demonstrations apart from other tokens, which "
        f"{name} does not allow ({why}). Use attn_implementation=sdpa, or pcw."
    )


def check_no_positions(method: Method, model: PreTrainedModel) -> None:
    """Check that a model whose positions were switched off does not tell them apart."""
    if tells_positions_apart(model):
        raise Unsupported(
            f"{method.name} needs a model whose positions can be taken away, and "
            f"{type(model).__name__} still tells them apart with rotary angles and learned "
            "positions switched off."
        )


def check_generates(
    method: Method,
    model: PreTrainedModel,
    can: Capabilities,
    context: Context,
    settings: GenerationSettings | None = None,
) -> None:
    """Check that texts can be generated after a context.

    `generate` continues from the model's cache, or the method does not need it for this context. If
    a text runs on several memories, the model takes padded rows, and the settings give all rows of
    a text the same next token.
    """
    name = type(model).__name__
    if not (can.can_generate or (model.can_generate() and method.is_ordinary(context))):
        raise Unsupported(
            f"{method.name} generates no text with {name}: transformers' generate does not "
            "continue from its cache as the model itself does. Tasks that are scored by "
            "log-likelihood work."
        )
    if settings is None:
        return
    has_several = len(method.contexts(context)) > 1
    has_all = method.footprint(context).kept >= len(context.tokens)
    if settings.penalizes and (has_several or not has_all):
        raise InputError(
            f"{method.name}: a text has no row with all demonstrations, whose tokens could be "
            "penalized: give repetition_penalty=1 and encoder_repetition_penalty=1."
        )
    if not has_several:
        return
    if not can.can_pad:
        raise Unsupported(
            f"{method.name} generates no text with {name}: its rows have memories of different "
            "lengths, which need padding. Tasks that are scored by log-likelihood work."
        )
    if settings.beams > 1 or settings.samples or settings.reads_rows:
        raise InputError(
            f"{method.name}: several memories choose each token together, always greedily: give no "
            "num_beams, no do_sample and no settings that read the rows of a batch "
            "(no_repeat_ngram_size, bad_words_ids, ...)."
        )


def keeps_window(method: Method, can: Capabilities) -> bool:
    """Whether rows may be longer than the model's window.

    Some layers then hide all tokens before it, whatever the mask shows (GPT-Neo). transformers runs
    such rows in the same way. The method is then not invariant.
    """
    one_memory = method.one_pass and not method.memory_depends_on_query
    return can.keeps_window and method.needs_mask and one_memory


def longest_row(method: Method, can: Capabilities) -> int | None:
    """How many tokens a row of the method may have. None: as many as the model has positions."""
    limits = []
    if method.needs_mask and can.window is not None:
        limits.append(can.window)
    if method.needs_positions and can.scaled_from is not None:
        limits.append(can.scaled_from)
    return min(limits, default=None)


def warn(method: Method, model: PreTrainedModel, can: Capabilities) -> None:
    """Warn about a model whose window hides demonstrations, or that has no cache."""
    if keeps_window(method, can):
        log.warning(
            "%s: some layers of %s attend to the last %d tokens only, whatever the mask shows. "
            "Longer prompts run as transformers runs them, and their results depend on the order "
            "of the demonstrations.",
            *(method.name, type(model).__name__, can.window),
        )
    if can.no_memory:
        log.warning(
            "%s does not continue from its cache (%s): every prompt is run as a whole, as with "
            "--model hf.",
            *(type(model).__name__, can.no_memory),
        )

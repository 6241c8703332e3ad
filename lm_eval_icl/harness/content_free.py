"""The content-free query of a task: its template, filled in with a text that says nothing in place of a document's.

The query alone is rendered from the changed document. Everything else (the description, the demonstrations, the
options) is that of the real one.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from jinja2 import meta
from lm_eval import utils
from lm_eval.api.task import ConfigurableTask

from lm_eval_icl.errors import InputError, refusing
from lm_eval_icl.harness.prompts import recording, structure_error
from lm_eval_icl.harness.tasks import These, pool_of, texts_in, with_texts
from lm_eval_icl.prompts.prompt import FewShotPrompt

Doc = Mapping[str, Any]
# Stands for a text of a document, where what the template adds is looked for.
_SENTINEL = "\U000f1c1f"


class Queries:
    """Renders queries of a task as lm-eval does for evaluation, with other texts than the document's.

    Args:
        task: a task with options, and one query for all options of a document.
        arguments: those of `ConfigurableTask.fewshot_context` (a chat template, a system instruction).

    Attributes:
        fields: the fields that the query is made from; None for all.

    Raises:
        InputError: nobody can say which texts of a document its template reads.
    """

    def __init__(self, task: ConfigurableTask, arguments: Mapping[str, Any]) -> None:
        self.task, self._arguments = task, arguments
        # As many demonstrations as the documents have, whichever these are: a chat template may join them with the
        # query.
        self._shots = pool_of(task)[: int(task.config.num_fewshot or 0)]
        self.fields: tuple[str, ...] | None = None
        template = task.config.doc_to_text
        if task.prompt is not None or not (isinstance(template, str) or callable(template)):
            raise InputError("its query comes from a prompt that is no template of fields.")
        if template in task.features:
            self.fields = (template,)
        elif isinstance(template, str):
            with refusing("doc_to_text"):
                self.fields = tuple(sorted(meta.find_undeclared_variables(utils.env.parse(template))))

    def read_by_template(self, doc: Doc) -> dict[str, Any]:
        """The fields of a document that its query is made from, which hold texts."""
        fields = doc if self.fields is None else [name for name in self.fields if name in doc]
        return {name: doc[name] for name in fields if texts_in(doc[name])}

    def of(self, doc: Doc) -> str:
        """The query of a document."""
        return self._render(doc, self.task.doc_to_text(doc))

    def content_free(self, doc: Doc, texts: Mapping[str, str] | str) -> str:
        """A document's query, each text in the fields that it is made from replaced by another.

        Args:
            texts: what stands for the texts of each field, or of all fields.

        Raises:
            InputError: the query cannot be rendered, or still says something of the document, or not the other text.
        """
        fields = self.read_by_template(doc)
        if not fields:
            raise InputError("its query is made from no text of a document, so that none can be left out.")
        by_field = dict.fromkeys(fields, texts) if isinstance(texts, str) else {name: texts[name] for name in fields}
        with refusing(f"doc_to_text: cannot be filled in with {by_field!r} in place of the document's texts"):
            query = self._filled_in(doc, by_field)
        for name, value in fields.items():
            for text in map(str.strip, texts_in(value)):
                # A template may have a document's word itself.
                if len(text) >= 4 and text in query and not self._has_itself(text, name):
                    raise InputError(
                        f"doc_to_text: its query without the text of a document still has that of the field {name!r} "
                        f"({text[:40]!r})."
                    )
        if not any(_plain(text) in _plain(query) for text in by_field.values()):
            raise InputError(f"doc_to_text: its query does not show the text {next(iter(by_field.values()))[:40]!r}.")
        return query

    def signature(self, doc: Doc) -> str:
        """What the content-free query of a document depends on: equal ones have equal queries."""
        read = {name: value for name, value in doc.items() if self.fields is None or name in self.fields}
        free = {name: with_texts(value, lambda _: _SENTINEL) for name, value in self.read_by_template(doc).items()}
        return json.dumps([{**read, **free}, self.task.doc_to_prefix(doc)], sort_keys=True, default=str)

    def premise(self, doc: Doc) -> str:
        """What the template puts behind the last text of a document, such as "\\nSentiment:"."""
        _, sentinel, tail = self._with_sentinels(doc).rpartition(_SENTINEL)
        if not sentinel or not tail.strip():
            raise InputError("its template puts nothing behind the document's text: give premise=TEXT.")
        return tail

    def _filled_in(self, doc: Doc, by_field: Mapping[str, str]) -> str:
        """The query of a document with these texts in place of those in its fields."""

        def replaced(name: str) -> Any:
            return with_texts(doc[name], lambda _: by_field[name])

        return self._render(doc, self.task.doc_to_text({**doc, **{name: replaced(name) for name in by_field}}))

    def _render(self, doc: Doc, text: Any) -> str:
        """The last part of the prompt of a document, whose `doc_to_text` is this text."""
        task = copy.copy(self.task)
        task._config = copy.copy(task.config)
        task.set_config("doc_to_text", lambda _: text)
        task.sampler = These(self._shots)
        shots, gen_prefix = len(self._shots), self.task.doc_to_prefix(doc)
        with recording():
            prompt = task.fewshot_context(doc, shots, gen_prefix=gen_prefix, **self._arguments)
        if not isinstance(prompt, FewShotPrompt):
            raise structure_error(str(task.config.task))
        return prompt.query

    def _has_itself(self, text: str, field: str) -> bool:
        """Whether the template has a text in the queries of other documents, too."""
        docs = (doc for doc in self.task.eval_docs if text not in " ".join(texts_in(doc.get(field))))
        other = next(iter(docs), None)
        return other is not None and text in self._with_sentinels(other)

    def _with_sentinels(self, doc: Doc) -> str:
        with refusing("doc_to_text: cannot be filled in without the document's texts"):
            return self._filled_in(doc, dict.fromkeys(self.read_by_template(doc), _SENTINEL))


def _plain(text: str) -> str:
    return " ".join(text.lower().split())

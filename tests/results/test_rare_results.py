"""Results of rare kinds: without log-likelihoods, with texts as targets, of strangers' files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lm_eval_icl import results as tables
from lm_eval_icl.errors import InputError
from lm_eval_icl.results.build import build
from lm_eval_icl.results.collect import collect, faults
from lm_eval_icl.results.fields import fields_of
from lm_eval_icl.results.read import read
from lm_eval_icl.results.rivals import named
from tests.boards import write, write_samples
from tests.results.files import board_of, by_method, samples_in

Sample = dict[str, Any]


def changed(folder: Path, change: Callable[[Sample], object], *arguments: Any, **keys: Any) -> Path:
    """A run whose samples are changed one by one."""
    file = write(folder, *arguments, **keys)
    samples = samples_in(file)
    for sample in samples:
        change(sample)
    write_samples(file, "t", samples)
    return file


def as_texts(sample: Sample) -> None:
    """The document was answered with a text, which has no log-likelihood."""
    sample["filtered_resps"] = [f"text {sample['acc']}"]
    sample["arguments"] = {"gen_args_0": sample["arguments"]["gen_args_0"]}


def with_messages(sample: Sample) -> None:
    """The prompt is the messages of a chat."""
    for arguments in sample["arguments"].values():
        arguments["arg_0"] = [{"role": "user", "content": arguments["arg_0"]}]


def with_target_in_words(sample: Sample) -> None:
    sample["target"] = ("good", "bad")[int(sample["target"])]


def test_messages_of_a_chat_are_a_prompt(tmp_path: Path):
    for seed in (0, 1):
        changed(tmp_path, with_messages, "icl", seed)
    (entry,) = board_of(tmp_path).entries
    assert [s.label for s in entry.cells["t"].sets] == ["seed 0", "seed 1"]


def test_a_prompt_without_the_delimiter_is_a_demonstration_as_a_whole(tmp_path: Path):
    write(tmp_path, fewshot_delimiter="|")
    (entry,) = board_of(tmp_path).entries
    assert entry.cells["t"].sets[0].answered[0].answers.each_own


def test_a_delimiter_that_is_no_text_is_none(tmp_path: Path):
    write(tmp_path, fewshot_delimiter=7)
    (entry,) = board_of(tmp_path).entries
    assert entry.cells["t"].estimate.mean == 1


def test_a_target_may_be_the_text_of_an_option(tmp_path: Path):
    changed(tmp_path, with_target_in_words, gold=[1] * 30 + [0] * 10)
    (entry,) = board_of(tmp_path).entries
    assert entry.cells["t"].majority == 0.75


def test_texts_have_no_order_sensitivity(tmp_path: Path):
    for order in (0, 1):
        put = {"config.icl": {"method": "icl", "study": {"order": order}}}
        changed(tmp_path, as_texts, order=order, put=put)
    (entry,) = board_of(tmp_path).entries
    cell = entry.cells["t"]
    assert len(cell.sets[0].answered) == 2
    assert cell.sensitivity is None


def test_equal_texts_confirm_each_other(tmp_path: Path):
    for _ in range(2):
        changed(tmp_path, as_texts, put={"provenance": {"responses": {"read": 0}}})
    (entry,) = board_of(tmp_path).entries
    assert "confirmed" in entry.cells["t"].marks


def test_texts_have_no_calibration(tmp_path: Path):
    changed(tmp_path, as_texts)
    _, (left_out,) = read([tmp_path], quiet=True, metric="ece")
    words = "ece needs the options' log-likelihoods, and which option is right"
    assert words in left_out.why


def test_samples_of_other_documents_than_the_results_are_not_used(tmp_path: Path):
    file = write(tmp_path)
    write_samples(file, "t", samples_in(file)[:-1])
    (entry,) = board_of(tmp_path).entries
    words = "they are of 39 documents, the results of 40"
    assert any(words in mark for mark in entry.cells["t"].marks)


def test_a_task_without_a_metric_is_left_out(tmp_path: Path):
    write(tmp_path, "icl")
    write(tmp_path, "pcw", put={"results.t": {"sample_len": 40}})
    board = board_of(tmp_path)
    assert [entry.method for entry in board.entries] == ["icl"]
    assert "it has no metric" in str(board.left_out)


def test_an_address_in_memory_is_no_difference(tmp_path: Path):
    write(tmp_path, seed=0, process_results="<function f at 0x7f01>")
    write(tmp_path, seed=1, process_results="<function f at 0x7f02>")
    board = board_of(tmp_path)
    assert [column.name for column in board.columns] == ["t"]


def test_the_function_of_few_shot_documents_is_that_of_the_documents(tmp_path: Path):
    """lm-eval writes its code in one place, and its address in the other."""
    code = "def p(docs):\n    return docs"
    write(tmp_path, seed=0, process_docs=code, fewshot_config={})
    shots = {"process_docs": "<function p at 0x7f02>"}
    write(tmp_path, seed=1, process_docs=code, fewshot_config=shots)
    assert [column.name for column in board_of(tmp_path).columns] == ["t"]


def test_rows_of_a_study_on_metaicls_tasks_are_known_in_any_order():
    def rows(indices: list[int], seed: int) -> str:
        config = {"icl": {"study": {"indices": indices}}, "fewshot_seed": seed}
        return fields_of({"config": config}, "metaicl_x").demonstration_rows

    assert rows([2, 1], 3) == rows([1, 2], 3) != ""
    assert rows([1, 2], 4) != rows([1, 2], 3)


def test_a_rule_says_how_many_rows_of_the_pool_it_reads(tmp_path: Path):
    facts = {"rule": "prior", "arguments": {"of": "pool", "m": 7}, "says": [0, 1] * 20}
    write(tmp_path, rules={"prior": facts})
    reads = [entry.reads for entry in board_of(tmp_path).entries if entry.rule]
    assert any("7" in text for text in reads[0])


def test_a_name_that_cannot_be_printed_is_escaped(tmp_path: Path):
    write(tmp_path, put={"config.model_args.pretrained": "org/\ud800"})
    (entry,) = board_of(tmp_path).entries
    assert entry.on.encode() == b"org/?"


def test_a_sample_that_cannot_be_written_as_it_is_can_be_collected(tmp_path: Path):
    changed(tmp_path, lambda sample: sample.update(target_hash="\ud800"))
    (file,) = collect(read([tmp_path], quiet=True)[0], tmp_path)
    assert not faults(file)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_log_likelihood_that_is_not_finite_has_no_place_on_the_card(tmp_path: Path, value: str):
    write(tmp_path / "random", metadata={"labels": "random"})
    changed(tmp_path, lambda sample: sample.update(filtered_resps=[[value, False]] * 2))
    card = board_of(tmp_path).card
    assert card is not None
    assert [column.name for column in card.properties] == ["accuracy", "random labels cost"]


@pytest.mark.parametrize("date", [-1.0, 1e30])
def test_a_date_that_cannot_be_is_none(tmp_path: Path, date: float):
    write(tmp_path, put={"date": date})
    ((run,), _) = read([tmp_path], quiet=True)
    assert run.date == 0


def test_a_name_of_several_rows_is_refused(tmp_path: Path):
    for model in ("org/a", "org/b"):
        write(tmp_path, put={"config.model_args.pretrained": model})
    with pytest.raises(InputError, match="icl: several entries have this name: icl on org/"):
        named(board_of(tmp_path).entries, "icl")


def test_a_row_by_its_name_is_the_baseline_of_all_others(tmp_path: Path):
    for method in ("icl", "pcw", "star"):
        write(tmp_path / method, method)
    pcw = by_method(board_of(tmp_path))["pcw"]
    board = board_of(tmp_path, baseline=pcw.name)
    others = [entry.name for entry in board.entries if entry.method != "pcw"]
    assert board.baseline == dict.fromkeys(others, pcw.name)


def test_a_row_is_not_compared_with_a_baseline_without_samples(tmp_path: Path):
    write(tmp_path / "icl", "icl", samples=False)
    write(tmp_path / "pcw", "pcw")
    rows = by_method(board_of(tmp_path))
    assert "not compared" in rows["pcw"].cells["t"].marks
    assert "not compared" not in rows["icl"].cells["t"].marks


F1 = {"f1,none": 0.5, "f1_stderr,none": 0.1, "sample_len": 40}
OTHER_METRIC = {"results.t": F1, "higher_is_better.t": {"f1": True}}


def test_two_metrics_of_a_task_are_two_columns(tmp_path: Path):
    write(tmp_path / "icl", "icl")
    write(tmp_path / "pcw", "pcw", samples=False, put=OTHER_METRIC)
    names = {column.name for column in board_of(tmp_path).columns if column.kind == "task"}
    assert names == {"t (acc)", "t (f1)"}


def test_a_group_of_several_metrics_has_no_mean(tmp_path: Path):
    write(tmp_path / "u", task="u")
    write(tmp_path / "t", samples=False, put=OTHER_METRIC)
    board = board_of(tmp_path, groups={"g": {"t": 0.5, "u": 0.5}})
    assert {column.name for column in board.columns} == {"t", "u"}


def test_nothing_to_show_is_one_line(tmp_path: Path):
    with pytest.raises(InputError, match="no results of lm-eval that can be used were found"):
        build([])
    write(tmp_path / "icl", "icl", task="t")
    write(tmp_path / "pcw", "pcw", task="u")
    with pytest.raises(InputError, match="no result of these tasks that can be used was found"):
        board_of(tmp_path, tasks=["g"], groups={"g": {"t": 0.5, "u": 0.5}})


def test_a_file_of_json_that_has_no_results_is_told_so(tmp_path: Path):
    file = write(tmp_path)
    results = json.loads(file.read_text())
    del results["results"]
    file.write_text(json.dumps(results))
    _, left_out = read([tmp_path], quiet=True)
    assert len(left_out) == 1


def test_documents_without_log_likelihoods_have_no_calibration(tmp_path: Path):
    changed(tmp_path, as_texts)
    documents = tables.documents(tmp_path)
    assert len(documents) == 40
    with pytest.raises(ValueError, match="no document has the log-likelihoods of its options"):
        tables.ece(documents)


def test_documents_of_a_rule_whose_samples_are_not_used_are_no_rows(tmp_path: Path):
    rule = {"rule": "batch", "arguments": {}, "transductive": True, "says": [0, 1] * 20}
    write(tmp_path, rules={"batch": rule}, put={"results.t.acc,batch": 0.25})
    with pytest.warns(UserWarning, match="its samples are not used"):
        documents = tables.documents(tmp_path)
    assert set(documents["filter"]) == {"none"}


def test_a_rule_changes_no_exact_match(tmp_path: Path):
    rule = {"rule": "batch", "arguments": {}, "says": [0, 1] * 20}
    values = {"exact_match,none": 0.5, "exact_match,batch": 0.25, "sample_len": 40}
    put = {"results.t": values, "higher_is_better.t": {"exact_match": True}}
    write(tmp_path, samples=False, rules={"batch": rule}, put=put)
    ((run,), (left_out,)) = read([tmp_path], quiet=True)
    assert run.tasks["t"].value == 0.5
    assert run.decided == ()
    words = "task 't' under the decision rule 'batch' is left out: no rule changes exact_match."
    assert left_out.why == words

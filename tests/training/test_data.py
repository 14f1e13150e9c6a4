"""From files to batches: what is read, how it is divided, in which order it comes."""

import contextlib
import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece_tokenizer import sentencepiece_tokenizer
from tokenizers.processors import TemplateProcessing

from moe_runtime.errors import CheckpointError
from moe_runtime.models.lm.tokenizer import train_tokenizer
from moe_runtime.training.data import (
    Batches,
    Corpus,
    WindowStream,
    encode_corpus,
    held_out_windows,
    load_tokenizer,
    read_corpora,
    read_corpus,
    save_tokenizer,
    shorten,
)
from moe_runtime.training.run_config import DataConfig, SourceConfig


def data_config(share: float = 0.1, separator: str | None = None) -> DataConfig:
    return DataConfig(
        sources={"all": SourceConfig(files=("*",))},
        context=8,
        tokens_per_step=16,
        held_out_share=share,
        document_separator=separator,
    )


def corpus_of(folder: Path, source: SourceConfig, data: DataConfig | None = None) -> Corpus:
    return read_corpus("all", source, data or data_config(), folder)


def test_many_documents_are_divided_by_name_and_stay_on_their_side(tmp_path):
    source = SourceConfig(files=("**/*.txt",))
    for number in range(200):
        (tmp_path / f"{number}.txt").write_text(f"text {number}")
    before = corpus_of(tmp_path, source)
    assert 8 <= len(before.held_out) <= 34  # 20 expected, three standard deviations
    assert len(before.training) + len(before.held_out) == 200
    for number in range(200, 260):
        (tmp_path / f"{number}.txt").write_text(f"text {number}")
    after = corpus_of(tmp_path, source)
    assert set(before.held_out) <= set(after.held_out)
    assert set(before.training) <= set(after.training)


def test_few_documents_give_their_ends(tmp_path):
    (tmp_path / "a.txt").write_text("0123456789" * 10)
    corpus = corpus_of(tmp_path, SourceConfig(files=("a.txt",)))
    assert corpus.training == ("0123456789" * 9,)
    assert corpus.held_out == ("0123456789",)


@pytest.mark.parametrize("end", [b"\r\n", b"\r"])
def test_line_ends_are_read_as_text_files_have_them(tmp_path, end):
    path = tmp_path / "a.txt"
    path.write_bytes(end.join([b"one", b"two", b"", b"three", b""]) * 30)
    data, source = data_config(0.0, "\n\n"), SourceConfig(files=("a.txt",))
    found = corpus_of(tmp_path, source, data)
    assert list(found.training) == path.read_text().split("\n\n")
    path.write_bytes(path.read_bytes().replace(end, b"\n"))
    assert found.fingerprint == corpus_of(tmp_path, source, data).fingerprint


def test_a_tokenizer_that_cannot_be_written_is_an_error_of_the_file(tmp_path):
    """The library raises a plain `Exception` for a full disk."""
    tokenizer = train_tokenizer(["some text to train on"] * 10, vocab_size=300)
    (tmp_path / "tokenizer.json").symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match=r"the tokenizer cannot be written: .*No space left"):
        save_tokenizer(tokenizer, tmp_path)


def test_named_files_are_held_out_and_a_separator_divides_a_file(tmp_path):
    (tmp_path / "a.txt").write_text("one<end>two<end>\n<end>three")
    (tmp_path / "b.txt").write_text("four")
    source = SourceConfig(files=("a.txt",), held_out_files=("b.*",))
    corpus = corpus_of(tmp_path, source, data_config(separator="<end>"))
    assert corpus == Corpus(("one", "two", "three"), ("four",))
    among = SourceConfig(files=("*.txt",), held_out_files=("b.*",))
    assert corpus_of(tmp_path, among, data_config(separator="<end>")) == corpus
    (tmp_path / "link.txt").hardlink_to(tmp_path / "b.txt")
    (tmp_path / "soft.txt").symlink_to("b.txt")
    assert corpus_of(tmp_path, among, data_config(separator="<end>")) == corpus, "other names of it"
    every = replace(
        data_config(share=0.0, separator="<end>"),
        sources={"one": source, "all": SourceConfig(files=("*.txt",))},
    )
    corpora = read_corpora(every, tmp_path)
    for corpus in corpora.values():  # held out of one source is held out of all
        assert corpus.training == ("one", "two", "three")
    with pytest.raises(ValueError, match="all of its files are held out"):
        corpus_of(tmp_path, SourceConfig(files=("b.txt",), held_out_files=("*",)), data_config())


def test_a_file_that_two_patterns_name_is_read_once(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    corpus = corpus_of(tmp_path, SourceConfig(files=("a.txt", "*.txt")), data_config(share=0.0))
    assert corpus.training == ("text",)


def test_bad_text_is_explained(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "blank.txt").write_text(" \n\t\n")
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    with pytest.raises(ValueError, match=r"'all': no file matches '.*no-such"):
        corpus_of(tmp_path, SourceConfig(files=("no-such-*.txt",)))
    with pytest.raises(ValueError, match="no usable text"):
        corpus_of(tmp_path, SourceConfig(files=("empty.txt", "blank.txt")))
    with pytest.raises(ValueError, match=r"latin\.txt: not UTF-8 text \(byte 2"):
        corpus_of(tmp_path, SourceConfig(files=("latin.txt",)))
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match="held_out_files hold no text"):
        corpus_of(tmp_path, SourceConfig(files=("a.txt",), held_out_files=("empty.txt",)))


def test_encoding_is_kept_and_follows_text_and_tokenizer(tmp_path):
    corpus = Corpus(("the first text", "the second"), ("held out",))
    tokenizer = train_tokenizer(corpus.training, vocab_size=262)
    end = tokenizer.eos_token_id
    streams = encode_corpus(corpus, tokenizer, cache=tmp_path, name="all")
    decoded = tokenizer.decode(streams.training.tolist())
    assert decoded == "the first text<|endoftext|>the second<|endoftext|>"
    assert streams.training.dtype == np.uint16
    assert streams.held_out[-1] == end

    class NoEncoding:
        """The tokenizer's identity without its work."""

        backend_tokenizer = tokenizer.backend_tokenizer
        eos_token_id = end

    again = encode_corpus(corpus, NoEncoding(), cache=tmp_path, name="all")
    assert again.fingerprint == streams.fingerprint
    assert np.array_equal(again.training, streams.training)
    other = encode_corpus(
        Corpus(("the first text", "the Second"), ("held out",)),
        tokenizer,
        cache=tmp_path,
        name="all",
    )
    assert other.fingerprint != streams.fingerprint


@pytest.mark.parametrize(
    ("template", "adds_end"),
    [("<s> $A", False), ("<s> $A </s>", True), ("$A </s>", True), ("$A", False)],
)
def test_documents_begin_and_end_as_the_tokenizer_has_it(tmp_path, template, adds_end):
    """Against the tokenizer's own ids; what earlier versions kept without marks is not read."""
    tokenizer = sentencepiece_tokenizer()
    corpus = Corpus(("Once upon a time", "there was"), ("a time",))
    marks = [("<s>", 1), ("</s>", 2)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=template, pair=f"{template} $B", special_tokens=marks
    )
    found = encode_corpus(corpus, tokenizer, cache=tmp_path, name="all")
    end = [] if adds_end else [tokenizer.eos_token_id]
    expected = [token for text in corpus.training for token in [*tokenizer(text).input_ids, *end]]
    assert found.training.tolist() == expected
    assert found.held_out.tolist() == [*tokenizer("a time").input_ids, *end]
    backend = tokenizer.backend_tokenizer.to_str()
    earlier = f"{corpus.fingerprint}{backend}{tokenizer.eos_token_id}".encode()
    is_same = found.fingerprint == hashlib.sha256(earlier).hexdigest()[:16]
    assert is_same == (template == "$A")


def test_a_mark_of_byte_order_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone two" * 2)
    found = corpus_of(tmp_path, SourceConfig(files=("a.txt",)), data_config(0.0))
    assert found.training == ("one two\ufeffone two",), "only that of the file is taken off"


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".ndjson", ".csv", ".TSV"])
def test_records_are_not_trained_on_as_text(tmp_path, suffix):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / f"b{suffix}").write_text('{"text": "once"}')
    for source in (
        SourceConfig(files=("*",)),
        SourceConfig(files=("a.txt",), held_out_files=(f"b{suffix}",)),
    ):
        with pytest.raises(ValueError, match=rf"source 'all': .*b{suffix} holds records, and"):
            corpus_of(tmp_path, source)


@pytest.mark.parametrize(
    ("text", "is_refused"),
    [
        ('{"text": "once"}\n\n  {"text": "more"}\nand so on', True),
        ('\n{"text": "once"}', True),
        ('{"text": "once"}\nwas written there', False),
        ("{ x }\n{ y }", False),
        ("[1]\n[2]", False),
        ("[" * 9999, False),
        (" \n\n", False),
    ],
)
def test_json_lines_by_another_name_are_records(tmp_path, text, is_refused):
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_text("text")
    refused = pytest.raises(ValueError, match=r"a\.txt holds records, and .* as plain text")
    with refused if is_refused else contextlib.nullcontext():
        corpus_of(tmp_path, SourceConfig(files=("*",)))


def test_bad_tokenizers_are_explained(tmp_path):
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)
    train_tokenizer(["text"], vocab_size=262).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("[]")
    with pytest.raises(
        CheckpointError, match=r"tokenizer\.json cannot be read: expected a JSON ob"
    ):
        load_tokenizer(tmp_path)


@given(num_tokens=st.integers(10, 400), context=st.integers(2, 9), seed=st.integers(0, 5))
@settings(max_examples=60)
def test_an_epoch_visits_every_window_once(num_tokens, context, seed):
    ids = np.arange(num_tokens, dtype=np.uint16)
    stream = WindowStream(ids, context=context, seed=(seed,))
    for epoch in range(3):
        numbers = range(epoch * stream.windows_per_epoch, (epoch + 1) * stream.windows_per_epoch)
        windows = np.stack([stream.window(number) for number in numbers])
        assert (np.diff(windows, axis=1) == 1).all()
        targets = windows[:, 1:].reshape(-1)
        assert len(set(targets.tolist())) == len(targets)
        # What an epoch leaves out is less than two windows: the offset, and the rest at the end.
        assert num_tokens - len(targets) <= 2 * context


@given(weights=st.lists(st.floats(0.1, 5.0), min_size=1, max_size=4), steps=st.integers(1, 60))
@settings(max_examples=40)
def test_the_mixture_is_exact_and_a_position_restores_it(weights, steps):
    streams = {str(number): np.full(200, number, dtype=np.uint16) for number in range(len(weights))}
    named = {str(number): weight for number, weight in enumerate(weights)}

    def batches() -> Batches:
        return Batches(streams, named, context=4, seed=1)

    whole = batches()
    drawn = np.concatenate([whole.draw(3) for _ in range(steps)])
    for number, weight in enumerate(weights):
        expected = weight / sum(weights) * len(drawn)
        assert abs((drawn[:, 0] == number).sum() - expected) < len(weights)
    first = batches()
    first.draw(3)
    second = batches()
    second.seek(first.taken)
    assert np.array_equal(second.draw(5), first.draw(5))


def test_order_depends_on_the_seed_and_without_weights_size_counts():
    streams = {"big": np.arange(300, dtype=np.uint16), "small": np.arange(100, dtype=np.uint16)}

    def draw(seed: int) -> np.ndarray:
        return Batches(streams, {}, context=9, seed=seed).draw(20)

    assert np.array_equal(draw(0), draw(0))
    assert not np.array_equal(draw(0), draw(1))
    batches = Batches(streams, {"big": 0.0, "small": 0.0}, context=9, seed=0)
    batches.draw(20)
    assert batches.taken == (15, 5)


def test_bad_streams_are_explained():
    streams = {"long": np.arange(50, dtype=np.uint16), "short": np.arange(8, dtype=np.uint16)}
    with pytest.raises(ValueError, match="'short' is too short: expected at least 9 tokens"):
        Batches(streams, {}, context=8, seed=0)
    with pytest.raises(ValueError, match="'short' has no weight while 'long' has one"):
        Batches(streams, {"long": 1.0}, context=4, seed=0)


def test_short_windows_predict_the_same_tokens():
    windows = np.arange(3 * 13).reshape(3, 13)
    short = shorten(windows, 4)
    assert short.shape == (9, 5)
    assert np.array_equal(short[:, 1:].reshape(3, 12), windows[:, 1:])
    assert np.array_equal(short[:, :-1].reshape(3, 12), windows[:, :-1])


def test_held_out_windows_predict_each_token_once():
    ids = np.arange(103, dtype=np.uint32)
    windows = held_out_windows(ids, context=10, most_tokens=1000)
    assert windows[:, 1:].reshape(-1).tolist() == list(range(1, 101))
    assert len(held_out_windows(ids, context=10, most_tokens=35)) == 3
    assert len(held_out_windows(ids, context=10, most_tokens=3)) == 1
    assert len(held_out_windows(ids[:10], context=10, most_tokens=99)) == 0

"""Corpora that --data.mix names: of texts and of tokens, each cut into blocks of its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from app.config.needs import Needs
from app.data.config import CorpusData
from app.data.corpus import token_sets
from app.data.corpus.token_blocks import TokenBlocks
from app.data.corpus.token_sets import TokenTables
from app.data.leaks import Trained, refuse_shared
from app.data.loading import Tables, check_alone, source_tables
from app.data.mixtures.mix_file import FLAG, Mix, MixedSource, read_mix
from app.data.mixtures.tables import concatenated
from app.data.tables.splits import named_sets
from app.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class Corpora:
    """Tables of texts and blocks of tokens, one for each source of a mixture."""

    mix: Mix
    each: tuple[Any, ...]
    to_train_on: bool

    @property
    def tokens(self) -> TokenBlocks | None:
        """Return the first source that has tokens; None if all have texts."""
        return next((each for each in self.each if isinstance(each, TokenBlocks)), None)

    def texts(self, columns: Sequence[str]) -> "Dataset":
        """Return the texts of all sources, which have no tokens."""
        return concatenated(self.each, columns, [source.name for source in self.mix.sources])


def load(config: CorpusData, columns: Sequence[str], needs: Needs) -> TokenTables:
    """Open the sources to train on, and what to evaluate on: rows of all of them, unless --data.eval-path is given.

    Raises:
        UserError: a source cannot be read; or it has texts that are streamed.
    """
    check_alone(config)
    mix = read_mix(config, config.mix)
    opened = [_open(source, config, columns, needs, len(mix.sources)) for source in mix.sources]
    train = Corpora(mix, tuple(each.train for each in opened), to_train_on=True)
    trained = Trained.of(each.trained for each in opened)
    tokens = [each for each in train.each if isinstance(each, TokenBlocks)]
    if config.eval_path:
        asked = "--data.eval-path", config.eval_path, config.eval_split
        evaluation = token_sets.to_evaluate_on(config, columns, *asked, tokens, trained)
    else:
        refuse_shared({source.name: each.trained for source, each in zip(mix.sources, opened, strict=True)})
        evaluation = Corpora(mix, tuple(each.evaluation for each in opened), to_train_on=False)
    others = {
        name: token_sets.to_evaluate_on(config, columns, needs.set_flag, *place, tokens, trained)
        for name, place in named_sets(config.eval_sets).items()
    }
    if only := needs.only_set:
        return TokenTables(train, others[only])
    return TokenTables(train, evaluation, held_out=not config.eval_path, others=others, trained=trained)


def _open(source: MixedSource, config: CorpusData, columns: Sequence[str], needs: Needs, sources: int) -> Tables:
    own = source.applied(config, 1 / sources)
    assert isinstance(own, CorpusData)
    if token_sets.holds_tokens(source.path):
        if source.renamed or source.template:
            raise UserError(f"{FLAG}: the source {source.name} has tokens already: leave out its columns and template")
        return token_sets.to_train_on(own, columns, f"{FLAG} {source.name}:")
    tables = source_tables(source, own, needs, None, 0, columns)
    refuse_streamed_texts(tables, f"{FLAG}: the source {source.name}")
    return tables


def refuse_streamed_texts(tables: Tables, what: str) -> None:
    """Refuse texts that are streamed: how many blocks they make is known only when they are tokens.

    Raises:
        UserError: they are.
    """
    if tables.stream is not None:
        raise UserError(
            f"{what} is streamed, and how many blocks of tokens it makes is not known: make tokens of it once, with "
            "the command `tokenize`, and train on these"
        )

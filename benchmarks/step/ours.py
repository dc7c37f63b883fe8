"""hlat's engine, used as in the training loop."""

from contestants import Settings

from hlat.data.packed_sequences import PackedSequences
from hlat.engine.native.native_engine import NativeEngine
from hlat.model.decoder_spec import count_parameters


class Ours:
    """Contestant with the native engine."""

    def __init__(self, settings: Settings) -> None:
        config = settings.config
        self.engine = NativeEngine()
        self.engine.build(config)
        self.rate = config.optimizer.lr
        self.sequences = PackedSequences(settings.tokens())
        self.num_parameters = count_parameters(config.model)

    def step(self) -> None:
        self.pending = self.engine.train_step(self.sequences, self.rate)

    def loss(self) -> float:
        return self.engine.read_metrics(self.pending).loss


def open_trainer(settings: Settings) -> Ours:
    """Build the engine."""
    return Ours(settings)

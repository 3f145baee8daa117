"""Closing: the models that the workers agree on, and how the last of them becomes the result of the run."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from polyrhythm.core.requests import LastStep, LeaveRun, OfferResult, ShowNote, StepsDone
from polyrhythm.core.strategy import Strategy
from polyrhythm.model.consensus import ConsensusModel, joined
from polyrhythm.session.arguments import Arguments
from polyrhythm.session.batch_norm.policies import Policy
from polyrhythm.session.context import WorldContext
from polyrhythm.session.part import Parts
from polyrhythm.session.placement import Placement
from polyrhythm.session.result import digest, left_out, safetensors
from polyrhythm.session.salvage import salvaged


class Closing:
    """Ends the session of a worker, in order or not."""

    def __init__(
        self,
        context: WorldContext,
        strategy: Strategy,
        parts: Parts,
        placement: Placement,
        given: Arguments,
        norms: Policy | None,
    ) -> None:
        self._context, self._node, self._strategy, self._parts = context, context.node, strategy, parts
        self._placement, self._given, self._norms = placement, given, norms
        self._copies = ConsensusModel(given.models, parts.replicas)
        self._salvaging = threading.Lock()

    def agreed(self, with_others: bool, whole: bool) -> list[nn.Module]:
        """Copies of the models with the parameters that the workers agree on; not `whole`: parts of them."""
        parts = self._parts
        self._given.check_owned()
        parts.reattach()
        parts.check_writes()
        if with_others and parts.own.note:
            self._context.request(ShowNote(parts.own.note))
        if self._norms is not None:
            with parts.first.driver.meter.exchange():
                self._norms.agree()
        vectors = parts.consensus()
        return self.models(vectors) if whole else self.parts_of_models(vectors)

    def models(self, vectors: Sequence[Sequence[Tensor]]) -> list[nn.Module]:
        """Copies of the models with these parameters."""
        models = self.parts_of_models(vectors)
        self._placement.complete(models)
        return models

    def parts_of_models(self, vectors: Sequence[Sequence[Tensor]], lasting: bool = True) -> list[nn.Module]:
        """Copies of the models with these parameters: of divided ones, the part of this worker.

        Not `lasting`: in the memory of the parameters.
        """
        models = self._copies.copy(*vectors, lasting=lasting)
        if self._norms is not None:
            self._norms.show(joined(models))
        return models

    def close(self, left_early: bool) -> None:
        """The script is done: the worker finishes, and one worker sends the result."""
        parts, context, meter = self._parts, self._context, self._parts.first.driver.meter
        context.request(LastStep(parts.steps))
        with torch.no_grad():
            self._node.stopping.stepping = True  # it may fail half-way
            for part in parts:
                part.replica.leaves_early = left_early
                part.worker.finish()
                if part.driver.check is not None:
                    part.driver.check.compare(over=True)
            self._node.stopping.stepping = False
            if self._norms is not None:
                self._norms.finish()
            if self._strategy.traits.parameters_held_by_peers:
                context.request(StepsDone())  # until all are, others may need replies
            self._placement.settle()
            meter.report()
            context.flush()
            if context.request(LeaveRun()).last:
                self._send_result()

    def _send_result(self) -> None:
        final = [part.worker.consensus(final=True) for part in self._parts]
        if self._norms is not None:
            self._norms.collect()
        self._parts.first.driver.meter.report()
        self._context.flush()
        result = joined(self.parts_of_models(final, lasting=False))
        if self._placement.divided:
            return self._context.send_result("", [self._placement.send_parts(result)])
        if note := left_out(result):
            self._context.request(ShowNote(note))
        vectors = [vector for each in final for vector in each]
        self._context.send_result(digest(vectors), self._file(result))

    def salvage(self, untouched: bool) -> None:
        """The run has failed: sends the parameters that this worker has, or can get from servers."""
        parts = self._parts
        if not parts.steps or self._placement.divided:
            return  # of a divided model, one worker has only a part
        with self._salvaging, torch.no_grad(), self._context.blocking():
            intact = untouched or not self._node.stopping.stepping
            workers = [part.worker for part in parts]
            found = salvaged(self._strategy, self._context.me, workers, intact, in_step=untouched)
            parts.first.driver.meter.report()
            self._context.flush()
            if found is not None and self._context.request(OfferResult(found.source)).last:
                vectors = [vector for each in found.parameters for vector in each]
                result = joined(self._copies.copy(*found.parameters))
                self._context.send_result(digest(vectors), self._file(result))

    def _file(self, result: nn.Module) -> list[Tensor]:
        """A copy of the models as a file, with the names of the originals: some models rename copies."""
        return safetensors(result, joined(self._given.models).state_dict())

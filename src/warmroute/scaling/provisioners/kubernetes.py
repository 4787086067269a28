"""kubernetes: replicas of a Deployment, a StatefulSet or a LeaderWorkerSet.

Up: one write adds the token to the workload's annotations and one to its replicas. It names the version that it has
read, so that of two writers one is refused and reads again; a token that stands there already changes nothing.

Down: the controller chooses whom it ends, and takes those that start first, then those that are not ready, then those
that are cheapest to delete. So the victim is marked as both, and then one write takes its token and one replica away.
StatefulSets and LeaderWorkerSets end only their last one.

A Pod gets the token that it was started for written on it when it is first seen: the newest Pods have the newest
tokens. Those that were there before any token are machines, too, named by their own ids.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any, TypeVar

import httpx2
import msgspec
from lightkube import ApiError, AsyncClient, KubeConfig
from lightkube.core.exceptions import ConfigError as KubeConfigError
from lightkube.generic_resource import create_namespaced_resource
from lightkube.resources.apps_v1 import Deployment, StatefulSet
from lightkube.resources.core_v1 import Node, Pod
from lightkube.types import PatchType

from warmroute.config import ConfigError, ProvisionerConfig
from warmroute.scaling.offer import Offer
from warmroute.scaling.provisioner import CloudError, Machine, MachineState, NoAnswer, NoCapacity
from warmroute.scaling.provisioners import kube_pods as pods_of
from warmroute.scaling.provisioners.configured import configured_offer, sanity_of
from warmroute.scaling.provisioners.kube_pods import Object

log = logging.getLogger("warmroute.scaling")

T = TypeVar("T")

TOKENS = "warmroute/tokens"
"""On the workload: each token that it was scaled up for, and its offer."""
ENDED = "warmroute/ended"
"""On the workload: uid of each Pod that it was scaled down for, until the Pod is gone."""
TRIES = 8
SEEN_S = 0.2
"""Time for the controller to see that the victim is not ready before it is told to end one."""
CHOICE_S = 5.0
"""How long to look whom the controller ends."""
LeaderWorkerSet = create_namespaced_resource("leaderworkerset.x-k8s.io", "v1", "LeaderWorkerSet", "leaderworkersets")
KINDS: dict[str, Any] = {
    "deployment": Deployment,
    "statefulset": StatefulSet,
    "leaderworkerset": LeaderWorkerSet,
}


class KubernetesProvisioner:
    def __init__(self, config: ProvisionerConfig) -> None:
        self.name = config.label
        self._config = config
        self._sanity = sanity_of(config, free=True)
        self._kind: Any = KINDS[config.workload]
        self._may_see_nodes = True
        self._turn = asyncio.Lock()
        """Of two that are marked at once, the controller might end the one that was not asked for yet."""
        try:
            found = KubeConfig.from_file(config.kubeconfig) if config.kubeconfig else KubeConfig.from_env()
            one = found.get(config.context) if config.context else found.get()
            self._client = AsyncClient(
                config=one,
                namespace=config.namespace or None,
                timeout=httpx2.Timeout(config.timeout_s),
                field_manager="warmroute",
                trust_env=False,
            )
        except (KubeConfigError, OSError) as error:
            raise ConfigError(f"provisioners.kubeconfig ({config.label}): {error}") from None

    async def offers(self) -> list[Offer]:
        return self._sanity.check([configured_offer(self._config, self._config.workload_name, "kubernetes")])

    async def provision(self, offer: Offer, token: str) -> None:
        def up(workload: Object) -> Object | None:
            tokens = _tokens(workload)
            if token in tokens:
                return None
            replicas = _replicas(workload)
            if self._config.most and replicas >= self._config.most:
                raise NoCapacity(f"{self.name}: {replicas} replicas are there, which is the most")
            return _patch(workload, replicas + 1, {TOKENS: {**tokens, token: offer.name}})

        await self._bounded(self._change(up), "scale up")

    async def status(self) -> list[Machine]:
        return await self._bounded(self._status(), "status")

    async def terminate(self, machine: Machine) -> None:
        async def in_turn() -> None:
            async with self._turn:
                await self._terminate(machine)

        await self._bounded(in_turn(), "scale down")

    async def close(self) -> None:
        await self._client.close()

    async def _bounded(self, call: Coroutine[Any, Any, T], what: str) -> T:
        """Whatever goes wrong is a CloudError with a sentence."""
        try:
            async with asyncio.timeout(self._config.timeout_s):
                return await call
        except TimeoutError:
            raise NoAnswer(f"{self.name}: {what} took longer than {self._config.timeout_s:g} s") from None
        except ApiError as error:
            message = f"{self.name}: {what}: {error.status.message or error}"
            raise (NoCapacity if "exceeded quota" in message else CloudError)(message) from None
        except (httpx2.HTTPError, KubeConfigError) as error:
            raise CloudError(f"{self.name}: {what}: {error or type(error).__name__}") from None
        except (ValueError, KeyError, TypeError) as error:
            raise CloudError(f"{self.name}: {what}: the answer cannot be read: {error!r}") from None

    async def _workload(self) -> Object:
        found = await self._client.get(self._kind, self._config.workload_name)
        return _plain(found)

    async def _pods(self, workload: Object) -> list[Object]:
        labels: Any = pods_of.selector_of(workload, self._config.workload)  # pairs: a key may come twice
        found = [_plain(pod) async for pod in self._client.list(Pod, labels=labels)]
        return [pod for pod in found if pods_of.is_of(pod, workload, self._config.workload)]

    async def _change(self, how: Callable[[Object], Object | None]) -> None:
        """Reads, changes and writes, and again where another writer was faster."""
        for attempt in range(TRIES):
            patch = how(await self._workload())
            if patch is None:
                return
            try:
                await self._client.patch(self._kind, self._config.workload_name, patch, patch_type=PatchType.MERGE)
            except ApiError as error:
                if error.status.code != 409:
                    raise
                await asyncio.sleep(0.02 * 2**attempt)
            else:
                return
        raise CloudError(f"{self.name}: {self._config.workload_name} was changed by others {TRIES} times meanwhile")

    async def _status(self) -> list[Machine]:
        workload, pods = await self._hand_out_all()
        tokens = _tokens(workload)
        ended = _ended(workload)
        nodes = await self._nodes_of(pods)
        last = max((pods_of.ordinal_of(pod) for pod in pods if pods_of.is_live(pod)), default=-1)
        held = {pods_of.notes(pod).get(pods_of.TOKEN) for pod in pods if pods_of.is_live(pod)}
        machines = []
        for pod in pods:
            token = pods_of.notes(pod).get(pods_of.TOKEN)
            if not token or (not pods_of.is_live(pod) and token in held):  # then another has come in its place
                token = f"pod-{_uid(pod)}"
            state, node = pods_of.state_of(pod), nodes.get((pod.get("spec") or {}).get("nodeName") or "")
            taken_back = pods_of.taken_back(pod, node)
            asked = _uid(pod) in ended
            if asked and state in (MachineState.PENDING, MachineState.RUNNING):
                state = MachineState.ENDING
            machines.append(
                Machine(
                    id=pods_of.meta(pod)["name"],
                    token=token,
                    offer=self._config.workload_name,
                    state=state,
                    url=pods_of.url_of(pod, self._config.port),
                    # Ended by somebody else: an eviction, a drain of its node, a roll-out.
                    reclaimed=bool(taken_back) or (state is MachineState.ENDING and not asked),
                    started_s=pods_of.created_s(pod),
                    reason=taken_back or pods_of.reason_of(pod),
                    island=self._config.island or pods_of.island_of(node),
                    endable=self._config.workload == "deployment" or pods_of.ordinal_of(pod) == last,
                )
            )
        seen = {machine.token for machine in machines}
        trouble = pods_of.condition(workload, "ReplicaFailure")
        machines += [
            Machine(
                id=f"token {token}",
                token=token,
                offer=offer,
                state=MachineState.PENDING,
                reason=str(trouble.get("message", ""))
                if trouble.get("status") == "True"
                else "its Pod is not there yet",
            )
            for token, offer in tokens.items()
            if token not in seen
        ]
        return machines

    async def _hand_out_all(self) -> tuple[Object, list[Object]]:
        """The workload and its Pods, each with its token."""
        workload = await self._workload()
        pods = await self._pods(workload)
        ended = _ended(workload)
        await self._hand_out(_tokens(workload), _replicas(workload), [pod for pod in pods if _uid(pod) not in ended])
        return workload, pods

    async def _hand_out(self, tokens: dict[str, str], replicas: int, pods: list[Object]) -> None:
        """Writes on each new Pod which token it was started for. The oldest without one were there before."""
        pods = [pod for pod in pods if pods_of.is_live(pod)]
        taken = {pods_of.notes(pod).get(pods_of.TOKEN) for pod in pods}
        free_tokens = [token for token in tokens if token not in taken]
        bare = sorted(
            (pod for pod in pods if pods_of.notes(pod).get(pods_of.TOKEN) not in tokens),
            # Times are in whole seconds: of those made within one, the one that starts came last.
            key=lambda pod: (pods_of.created_s(pod), pods_of.is_starting(pod), pods_of.ordinal_of(pod)),
        )
        before = max(0, replicas - len(tokens))
        for pod, token in zip(bare[before:], free_tokens, strict=False):
            await self._annotate(pod, {pods_of.TOKEN: token})

    async def _annotate(self, pod: Object, notes: dict[str, str]) -> None:
        name = pods_of.meta(pod)["name"]
        try:
            await self._client.patch(Pod, name, {"metadata": {"annotations": notes}}, patch_type=PatchType.MERGE)
        except ApiError as error:
            if error.status.code != 404:
                raise
        pods_of.meta(pod).setdefault("annotations", {}).update(notes)

    async def _nodes_of(self, pods: list[Object]) -> dict[str, Object]:
        """The nodes that they stand on, as far as the router may see them."""
        names = {str((pod.get("spec") or {}).get("nodeName") or "") for pod in pods} - {""}
        found: dict[str, Object] = {}
        for name in sorted(names) if self._may_see_nodes else ():
            try:
                found[name] = _plain(await self._client.get(Node, name))
            except ApiError as error:
                if error.status.code == 403:
                    self._may_see_nodes = False
                    log.warning("%s: nodes may not be read: regions and spot notices are not known", self.name)
                    break
                if error.status.code != 404:
                    raise
        return found

    async def _terminate(self, machine: Machine) -> None:
        workload = await self._workload()
        pods = await self._pods(workload)
        live = [pod for pod in pods if pods_of.is_live(pod)]
        others = _tokens(workload).keys() - {machine.token}
        named = [
            pod
            for pod in live
            if pods_of.meta(pod)["name"] == machine.id and pods_of.notes(pod).get(pods_of.TOKEN) not in others
        ]
        holders = [pod for pod in live if pods_of.notes(pod).get(pods_of.TOKEN) == machine.token]
        if not named and not holders:
            # Gone, or never there: what is left of it is its token.
            await self._change(lambda now: self._down(now, machine.token, None, pods))
            return
        victim = (named or holders)[0]  # where its controller has replaced it, the one that has its token now
        uid = _uid(victim)
        if uid in _ended(workload):
            return
        self._refuse_wrong_choice(victim, live)
        if self._config.workload == "deployment":
            await self._mark(victim)
            await asyncio.sleep(SEEN_S)
        await self._change(lambda now: self._down(now, machine.token, uid, pods))
        await self._see_whom(victim, {_uid(pod): pods_of.meta(pod)["name"] for pod in live})

    def _refuse_wrong_choice(self, victim: Object, live: list[Object]) -> None:
        """Raises CloudError where the controller would end another one."""
        name = pods_of.meta(victim)["name"]
        kind = self._config.workload
        if kind != "deployment":
            last = max(live, key=pods_of.ordinal_of)
            if last is not victim:
                raise CloudError(
                    f"{self.name}: a {kind} ends its last Pod, {pods_of.meta(last)['name']}, before {name}"
                )
            return
        ahead = [pods_of.meta(pod)["name"] for pod in live if pods_of.is_starting(pod)]
        if ahead and not pods_of.is_starting(victim):
            raise CloudError(
                f"{self.name}: {', '.join(ahead)} still starts, and the controller would end that before {name}: "
                "end it first, or wait"
            )

    async def _mark(self, victim: Object) -> None:
        """Makes it the one that the controller ends: the cheapest to delete, and not ready."""
        await self._annotate(victim, {pods_of.DELETION_COST: "-2147483648"})
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        unready = {"status": "False", "lastTransitionTime": now, "reason": "Warmroute", "message": "It was drained."}
        gates = [gate["conditionType"] for gate in (victim.get("spec") or {}).get("readinessGates") or ()]
        told = {"status": {"conditions": [{"type": kind, **unready} for kind in ("Ready", *gates)]}}
        try:
            await self._client.patch(Pod.Status, pods_of.meta(victim)["name"], told, patch_type=PatchType.STRATEGIC)
        except ApiError as error:
            if error.status.code != 404:
                raise

    def _down(self, workload: Object, token: str, uid: str | None, pods: list[Object]) -> Object | None:
        tokens, ended = _tokens(workload), _ended(workload)
        if (uid is None and token not in tokens) or (uid is not None and uid in ended):
            return None
        tokens.pop(token, None)
        there = {_uid(pod) for pod in pods}
        ended = [one for one in ended if one in there] + ([uid] if uid else [])
        return _patch(workload, max(0, _replicas(workload) - 1), {TOKENS: tokens, ENDED: ended})

    async def _see_whom(self, victim: Object, before: dict[str, str]) -> None:
        """Waits a little to see whom the controller ends; raises CloudError where it is another, or where another went
        meanwhile by itself: then the controller has as few as it was told, and the victim stays, in the other's place.
        """
        uid = _uid(victim)
        asked: set[str] = set()
        give_up_s = asyncio.get_running_loop().time() + CHOICE_S
        while asyncio.get_running_loop().time() < give_up_s:
            live = {_uid(pod) for pod in await self._pods(await self._workload()) if pods_of.is_live(pod)}
            if uid not in live:
                return
            asked.update(_ended(await self._workload()))  # several may be ended at once; each is said before it goes
            others = [name for one, name in before.items() if one not in live and one not in asked]
            if others:
                await self._change(lambda now: _without_ended(now, uid))
                await self._annotate(victim, {pods_of.DELETION_COST: "0"})
                await self._hand_out_all()
                raise CloudError(
                    f"{self.name}: the controller ended {', '.join(others)} instead of {pods_of.meta(victim)['name']}"
                )
            await asyncio.sleep(0.1)


def _plain(found: Any) -> Object:
    result: Object = found.to_dict()
    return result


def _uid(pod: Object) -> str:
    return str(pods_of.meta(pod)["uid"])


def _replicas(workload: Object) -> int:
    replicas = workload["spec"].get("replicas")
    return 1 if replicas is None else int(replicas)


def _tokens(workload: Object) -> dict[str, str]:
    return msgspec.json.decode(pods_of.notes(workload).get(TOKENS) or "{}", type=dict[str, str])


def _ended(workload: Object) -> list[str]:
    return msgspec.json.decode(pods_of.notes(workload).get(ENDED) or "[]", type=list[str])


def _patch(workload: Object, replicas: int, notes: dict[str, Any]) -> Object:
    written = {key: msgspec.json.encode(value).decode() for key, value in notes.items()}
    version = pods_of.meta(workload)["resourceVersion"]
    return {"metadata": {"resourceVersion": version, "annotations": written}, "spec": {"replicas": replicas}}


def _without_ended(workload: Object, uid: str) -> Object | None:
    ended = [one for one in _ended(workload) if one != uid]
    return _patch(workload, _replicas(workload), {ENDED: ended})

"""The provisioner `kubernetes`: Deployments and StatefulSets of engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any, TypeVar

import httpx2
import msgspec
from lightkube import ApiError, operators
from lightkube.core.exceptions import ConfigError as KubeConfigError
from lightkube.generic_resource import create_namespaced_resource
from lightkube.resources.apps_v1 import Deployment, StatefulSet
from lightkube.resources.core_v1 import Node, Pod
from lightkube.types import PatchType

from warmroute.config import ConfigError, ProvisionerConfig
from warmroute.event_log import EventLog
from warmroute.kubernetes_api import (
    Object,
    annotations_of,
    cluster_config,
    condition,
    island_of,
    labels_of,
    meta,
    typed_client,
)
from warmroute.scaling.offers import Offer, OfferValidator, configured_offer
from warmroute.scaling.provisioner import (
    Machine,
    MachineState,
    NoCapacity,
    ProvisionerError,
    ProvisionerTimeout,
    child_environment,
)

# Reads Pods and their nodes as the API server returns them: a machine's state, address, island, and whether the
# cluster reclaims it.

TOKEN = "warmroute/token"
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
LEADER_OF = "leaderworkerset.sigs.k8s.io/name"
WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"
RECLAIM_TAINTS = (
    "aws-node-termination-handler/",
    "cloud.google.com/impending-node-termination",
    "karpenter.sh/disrupted",
    "karpenter.sh/disruption",
    "ToBeDeletedByClusterAutoscaler",
    "node.kubernetes.io/out-of-service",
)
"""Taints, or their first characters, of a Kubernetes node that will be taken away soon."""


def is_live(pod: Object) -> bool:
    """Return whether the Pod's controller counts it: the Pod has neither ended nor been told to end."""
    return not meta(pod).get("deletionTimestamp") and (pod.get("status") or {}).get("phase") not in (
        "Succeeded",
        "Failed",
    )


def belongs_to(pod: Object, workload: Object, kind: str) -> bool:
    """Return whether the Pod belongs to this workload. A label selector may also match Pods of other workloads, except
    for a LeaderWorkerSet, whose Pods are labelled with its name. The name of a Deployment's ReplicaSet is the
    Deployment's name and the Pod's template hash."""
    if kind == "leaderworkerset":
        return True
    owner: Object = next((one for one in meta(pod).get("ownerReferences") or () if one.get("controller")), {})
    if kind == "statefulset":
        return bool(owner.get("uid") == meta(workload)["uid"])
    template_hash = labels_of(pod).get("pod-template-hash")
    return bool(owner.get("kind") == "ReplicaSet") and owner.get("name") == f"{meta(workload)['name']}-{template_hash}"


def is_starting(pod: Object) -> bool:
    """Return whether its controller would end it before any running Pod."""
    return not (pod.get("spec") or {}).get("nodeName") or (pod.get("status") or {}).get("phase") != "Running"


def state_of(pod: Object) -> MachineState:
    status = pod.get("status") or {}
    if meta(pod).get("deletionTimestamp"):
        return MachineState.TERMINATING
    if status.get("phase") in ("Succeeded", "Failed"):
        return MachineState.TERMINATED
    return MachineState.RUNNING if status.get("phase") == "Running" and status.get("podIP") else MachineState.PENDING


def url_of(pod: Object, port: int) -> str:
    address = (pod.get("status") or {}).get("podIP") or ""
    if not address:
        return ""
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def created_s(one: Object) -> float:
    text = meta(one).get("creationTimestamp")
    return datetime.fromisoformat(str(text).replace("Z", "+00:00")).timestamp() if text else 0.0


def reason_of(pod: Object) -> str:
    """Return why the Pod does not run, in the cluster's words."""
    scheduled = condition(pod, "PodScheduled")
    if scheduled.get("status") == "False":
        return str(scheduled.get("message") or scheduled.get("reason") or "it has no node yet")
    status = pod.get("status") or {}
    for container in status.get("containerStatuses") or ():
        waiting = (container.get("state") or {}).get("waiting")
        if waiting:
            return f"{waiting.get('reason', 'waiting')}: {waiting.get('message', '')}".rstrip(": ")
    return str(status.get("message") or status.get("reason") or "")


def reclaim_reason(pod: Object, node: Object | None) -> str:
    """Return why the cluster reclaims the Pod, or an empty string."""
    disruption = condition(pod, "DisruptionTarget")
    if disruption.get("status") == "True":
        return str(disruption.get("message") or disruption.get("reason") or "it is being evicted")
    for taint in ((node or {}).get("spec") or {}).get("taints") or ():
        if str(taint.get("key", "")).startswith(RECLAIM_TAINTS):
            return f"its node has the taint {taint['key']}"
    return ""


def ordinal_of(pod: Object) -> int:
    number = str(meta(pod).get("name", "")).rpartition("-")[2]
    return int(number) if number.isdigit() else -1


def selector_of(workload: Object, kind: str) -> list[tuple[str, Any]]:
    """Return the label selector of its Pods in lightkube's form; of a LeaderWorkerSet, only the leaders."""
    if kind == "leaderworkerset":
        return [(LEADER_OF, meta(workload)["name"]), (WORKER_INDEX, "0")]
    selector = workload["spec"].get("selector") or {}
    wanted: list[tuple[str, Any]] = list((selector.get("matchLabels") or {}).items())
    for one in selector.get("matchExpressions") or ():
        values = one.get("values") or ()
        operator: Any = {
            "In": lambda values=values: operators.in_(values),
            "NotIn": lambda values=values: operators.not_in(values),
            "Exists": operators.exists,
            "DoesNotExist": operators.not_exists,
        }[one["operator"]]
        wanted.append((one["key"], operator()))
    return wanted


# kubernetes: replicas of a Deployment, a StatefulSet or a LeaderWorkerSet.
#
# Up: one write adds the token to the workload's annotations and increments its replicas. The write names the resource
# version that was read, so that of two writers one is refused and reads again. A token that is already there changes
# nothing.
#
# Down: the controller chooses the Pod that it ends: first those that are starting, then those that are not ready, then
# those with the lowest deletion cost. So the router marks its Pod as not ready and cheapest, and then one write removes
# the token and decrements the replicas. A StatefulSet or LeaderWorkerSet always ends its last Pod.
#
# When the router first sees a Pod, it writes the token of the Pod's request on it: the newest Pods get the newest
# tokens. Pods that are older than all tokens are machines too, named by their uids.

log = EventLog("warmroute.scaling")

T = TypeVar("T")

TOKENS = "warmroute/tokens"
"""Annotation of the workload: the token of each request that added a replica, with its offer."""
ENDED = "warmroute/ended"
"""Annotation of the workload: the uid of each Pod that was removed, until the Pod is gone."""
MAX_TRIES = 8
"""Two routers that scale the same workload, or an HPA, cause conflicts. Pauses double from 20 ms: all tries take 5
s."""
NOT_READY_S = 0.2
"""Time for the controller to see that the Pod is not ready, before the replicas are decremented."""
VERIFY_S = 5.0
"""How long to watch which Pod the controller ends."""
LeaderWorkerSet = create_namespaced_resource("leaderworkerset.x-k8s.io", "v1", "LeaderWorkerSet", "leaderworkersets")
KINDS: dict[str, Any] = {"deployment": Deployment, "statefulset": StatefulSet, "leaderworkerset": LeaderWorkerSet}


class KubernetesProvisioner:
    def __init__(self, config: ProvisionerConfig) -> None:
        self.name = config.label
        self._config = config
        self._validator = OfferValidator(config, free=True)
        self._kind: Any = KINDS[config.workload]
        self._may_read_nodes = True
        self._terminate_lock = asyncio.Lock()
        """Of two marked Pods the controller might end the wrong one, so only one is marked at a time."""
        try:
            cluster = cluster_config(config.kubeconfig, config.context, child_environment(config))
            self._client = typed_client(cluster, config.namespace, config.timeout_s)
        except ConfigError as error:
            raise ConfigError(f"provisioners.kubeconfig ({config.label}): {error}") from None

    async def offers(self) -> list[Offer]:
        return self._validator.validate([configured_offer(self._config, self._config.workload_name, "kubernetes")])

    async def provision(self, offer: Offer, token: str) -> None:
        def add_replica(workload: Object) -> Object | None:
            tokens = _tokens(workload)
            if token in tokens:
                return None
            replicas = _replicas(workload)
            if self._config.max_nodes and replicas >= self._config.max_nodes:
                raise NoCapacity(f"{self.name}: {replicas} replicas, maximum is {self._config.max_nodes}")
            return _patch(workload, replicas + 1, {TOKENS: {**tokens, token: offer.name}})

        await self._bounded(self._change(add_replica), "scale up")

    async def status(self) -> list[Machine]:
        return await self._bounded(self._status(), "status")

    async def terminate(self, machine: Machine) -> None:
        await self._bounded(self._terminate(machine), "scale down")

    async def close(self) -> None:
        await self._client.close()

    async def _bounded(self, call: Coroutine[Any, Any, T], action: str) -> T:
        """Limit the time of a call, and turn each error into a ProvisionerError."""
        try:
            async with asyncio.timeout(self._config.timeout_s):
                return await call
        except TimeoutError:
            raise ProvisionerTimeout(f"{self.name}: {action} took longer than {self._config.timeout_s:g} s") from None
        except ApiError as error:
            message = f"{self.name}: {action}: {error.status.message or error}"
            # A ResourceQuota refuses with 403 and this text; there is no code for it.
            raise (NoCapacity if "exceeded quota" in message else ProvisionerError)(message) from None
        except (httpx2.HTTPError, KubeConfigError) as error:
            raise ProvisionerError(f"{self.name}: {action}: {error or type(error).__name__}") from None
        except (ValueError, KeyError, TypeError) as error:
            raise ProvisionerError(f"{self.name}: {action}: invalid answer: {error!r}") from None

    async def _workload(self) -> Object:
        return _to_dict(await self._client.get(self._kind, self._config.workload_name))

    async def _pods(self, workload: Object) -> list[Object]:
        labels: Any = selector_of(workload, self._config.workload)  # pairs: a key may occur twice
        found = [_to_dict(pod) async for pod in self._client.list(Pod, labels=labels)]
        return [pod for pod in found if belongs_to(pod, workload, self._config.workload)]

    async def _change(self, create_patch: Callable[[Object], Object | None]) -> None:
        """Read the workload and write a patch; start again if another writer was faster. None: nothing to change."""
        for attempt in range(MAX_TRIES):
            patch = create_patch(await self._workload())
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
        raise ProvisionerError(f"{self.name}: {self._config.workload_name} was changed by others {MAX_TRIES} times")

    async def _status(self) -> list[Machine]:
        workload, pods = await self._assign_tokens()
        tokens = _tokens(workload)
        ended = _ended(workload)
        nodes = await self._nodes_of(pods)
        last = max((ordinal_of(pod) for pod in pods if is_live(pod)), default=-1)
        live_tokens = {annotations_of(pod).get(TOKEN) for pod in pods if is_live(pod)}
        machines = []
        for pod in pods:
            token = annotations_of(pod).get(TOKEN)
            if not token or (not is_live(pod) and token in live_tokens):  # another Pod has replaced it
                token = f"pod-{_uid(pod)}"
            state, node = state_of(pod), nodes.get((pod.get("spec") or {}).get("nodeName") or "")
            reclaimed = reclaim_reason(pod, node)
            removed_by_us = _uid(pod) in ended
            if removed_by_us and state in (MachineState.PENDING, MachineState.RUNNING):
                state = MachineState.TERMINATING
            machines.append(
                Machine(
                    id=meta(pod)["name"],
                    token=token,
                    offer=self._config.workload_name,
                    state=state,
                    url=url_of(pod, self._config.port),
                    # Somebody else ends it: an eviction, a drain of its node, a rollout.
                    reclaimed=bool(reclaimed) or (state is MachineState.TERMINATING and not removed_by_us),
                    reason=reclaimed or reason_of(pod),
                    island=self._config.island or island_of(node),
                    removable=self._config.workload == "deployment" or ordinal_of(pod) == last,
                )
            )
        with_pod = {machine.token for machine in machines}
        failure = condition(workload, "ReplicaFailure")
        machines += [
            Machine(
                id=f"token {token}",
                token=token,
                offer=offer,
                state=MachineState.PENDING,
                reason=str(failure.get("message", ""))
                if failure.get("status") == "True"
                else "its Pod does not exist yet",
            )
            for token, offer in tokens.items()
            if token not in with_pod
        ]
        return machines

    async def _assign_tokens(self) -> tuple[Object, list[Object]]:
        """Return the workload and its Pods. Write on each new Pod the token of its request: the oldest Pods without one
        are older than all tokens."""
        workload = await self._workload()
        pods = await self._pods(workload)
        tokens, ended = _tokens(workload), _ended(workload)
        live = [pod for pod in pods if is_live(pod) and _uid(pod) not in ended]
        taken = {annotations_of(pod).get(TOKEN) for pod in live}
        free_tokens = [token for token in tokens if token not in taken]
        without_token = sorted(
            (pod for pod in live if annotations_of(pod).get(TOKEN) not in tokens),
            # Times are in whole seconds: of Pods created in the same second, a starting one is the newest.
            key=lambda pod: (created_s(pod), is_starting(pod), ordinal_of(pod)),
        )
        older = max(0, _replicas(workload) - len(tokens))
        for pod, token in zip(without_token[older:], free_tokens, strict=False):
            await self._annotate(pod, {TOKEN: token})
        return workload, pods

    async def _annotate(self, pod: Object, values: dict[str, str]) -> None:
        await self._patch_pod(Pod, pod, {"metadata": {"annotations": values}}, PatchType.MERGE)
        meta(pod).setdefault("annotations", {}).update(values)

    async def _patch_pod(self, kind: Any, pod: Object, patch: Object, patch_type: PatchType) -> None:
        """Patch a Pod, unless it is gone."""
        try:
            await self._client.patch(kind, meta(pod)["name"], patch, patch_type=patch_type)
        except ApiError as error:
            if error.status.code != 404:
                raise

    async def _nodes_of(self, pods: list[Object]) -> dict[str, Object]:
        """Return the Kubernetes nodes of the Pods, if the router may read them."""
        names = {str((pod.get("spec") or {}).get("nodeName") or "") for pod in pods} - {""}
        found: dict[str, Object] = {}
        for name in sorted(names) if self._may_read_nodes else ():
            try:
                found[name] = _to_dict(await self._client.get(Node, name))
            except ApiError as error:
                if error.status.code == 403:
                    self._may_read_nodes = False
                    log.warning(
                        "kubernetes_nodes_forbidden",
                        "The router may not read nodes, so it does not know regions and spot notices.",
                        provisioner=self.name,
                    )
                    break
                if error.status.code != 404:
                    raise
        return found

    async def _terminate(self, machine: Machine) -> None:
        async with self._terminate_lock:
            await self._terminate_pod(machine)

    async def _terminate_pod(self, machine: Machine) -> None:
        workload = await self._workload()
        pods = await self._pods(workload)
        live = [pod for pod in pods if is_live(pod)]
        others = _tokens(workload).keys() - {machine.token}
        named = [
            pod for pod in live if meta(pod)["name"] == machine.id and annotations_of(pod).get(TOKEN) not in others
        ]
        holders = [pod for pod in live if annotations_of(pod).get(TOKEN) == machine.token]
        if not named and not holders:
            # The Pod is gone, or never existed: only its token is left.
            await self._change(lambda now: self._remove_replica(now, machine.token, None, pods))
            return
        target = (named or holders)[0]  # if its controller has replaced it, the Pod that has its token now
        uid = _uid(target)
        if uid in _ended(workload):
            return
        self._check_order(target, live)
        if self._config.workload == "deployment":
            await self._mark(target)
            # The controller orders Pods by what its own cache shows, which lags behind the API server.
            await asyncio.sleep(NOT_READY_S)
        await self._change(lambda now: self._remove_replica(now, machine.token, uid, pods))
        await self._verify(target, {_uid(pod): meta(pod)["name"] for pod in live})

    def _check_order(self, target: Object, live: list[Object]) -> None:
        """Raise ProvisionerError if the controller would end another Pod first."""
        name = meta(target)["name"]
        kind = self._config.workload
        if kind != "deployment":
            last = max(live, key=ordinal_of)
            if last is not target:
                raise ProvisionerError(f"{self.name}: a {kind} ends its last Pod, {meta(last)['name']}, before {name}")
            return
        ahead = [meta(pod)["name"] for pod in live if is_starting(pod)]
        if ahead and not is_starting(target):
            raise ProvisionerError(
                f"{self.name}: {', '.join(ahead)} is starting, and the controller would end it before {name}"
            )

    async def _mark(self, target: Object) -> None:
        """Make this Pod the one that the controller ends: not ready, and with the lowest deletion cost."""
        await self._annotate(target, {DELETION_COST: "-2147483648"})
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        unready = {"status": "False", "lastTransitionTime": now, "reason": "Warmroute"}
        unready["message"] = "Drained by the router"
        gates = [gate["conditionType"] for gate in (target.get("spec") or {}).get("readinessGates") or ()]
        patch = {"status": {"conditions": [{"type": kind, **unready} for kind in ("Ready", *gates)]}}
        await self._patch_pod(Pod.Status, target, patch, PatchType.STRATEGIC)

    def _remove_replica(self, workload: Object, token: str, uid: str | None, pods: list[Object]) -> Object | None:
        tokens, ended = _tokens(workload), _ended(workload)
        if (uid is None and token not in tokens) or (uid is not None and uid in ended):
            return None
        tokens.pop(token, None)
        existing = {_uid(pod) for pod in pods}
        ended = [one for one in ended if one in existing] + ([uid] if uid else [])
        return _patch(workload, max(0, _replicas(workload) - 1), {TOKENS: tokens, ENDED: ended})

    async def _verify(self, target: Object, before: dict[str, str]) -> None:
        """Watch which Pod the controller ends. Raise ProvisionerError if it ends another one, or if another one ended
        by itself meanwhile: then the controller has its number of replicas, and the target stays."""
        uid = _uid(target)
        ended: set[str] = set()
        deadline_s = asyncio.get_running_loop().time() + VERIFY_S
        while asyncio.get_running_loop().time() < deadline_s:
            live = {_uid(pod) for pod in await self._pods(await self._workload()) if is_live(pod)}
            if uid not in live:
                return
            ended.update(_ended(await self._workload()))  # several may end at once; each is recorded before
            others = [name for one, name in before.items() if one not in live and one not in ended]
            if others:
                await self._change(
                    lambda now: _patch(now, _replicas(now), {ENDED: [one for one in _ended(now) if one != uid]})
                )
                # The Pod stays: as the cheapest one it would be ended at the next scale-down, whoever causes it.
                await self._annotate(target, {DELETION_COST: "0"})
                await self._assign_tokens()
                raise ProvisionerError(
                    f"{self.name}: the controller ended {', '.join(others)} instead of {meta(target)['name']}"
                )
            await asyncio.sleep(0.1)


def _to_dict(found: Any) -> Object:
    result: Object = found.to_dict()
    return result


def _uid(pod: Object) -> str:
    return str(meta(pod)["uid"])


def _replicas(workload: Object) -> int:
    replicas = workload["spec"].get("replicas")
    return 1 if replicas is None else int(replicas)


def _tokens(workload: Object) -> dict[str, str]:
    return msgspec.json.decode(annotations_of(workload).get(TOKENS) or "{}", type=dict[str, str])


def _ended(workload: Object) -> list[str]:
    return msgspec.json.decode(annotations_of(workload).get(ENDED) or "[]", type=list[str])


def _patch(workload: Object, replicas: int, values: dict[str, Any]) -> Object:
    encoded = {key: msgspec.json.encode(value).decode() for key, value in values.items()}
    version = meta(workload)["resourceVersion"]
    return {"metadata": {"resourceVersion": version, "annotations": encoded}, "spec": {"replicas": replicas}}

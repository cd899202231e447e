"""Reference connector for the suite, in each of the four patterns.

The connector shares no code with the suite: it uses the protobuf library, and stores all
data in one SQLite file:

    python plain.py --listen 127.0.0.1:9000

`mode` in the endpoint config selects the pattern. `defect` in the endpoint config, or
`--defect`, plants one defect. `bad` returns whether a defect is planted.
"""

import argparse
import json
import sqlite3
import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import grpc

from penstock.protocol._generated import materialize_pb2 as pb

if TYPE_CHECKING:
    from tests.conformance.plain_endpoint import PUSH, Endpoint, Refused, table_of
    from tests.conformance.plain_stream import Stream
else:  # As a script, its folder is on the path, and the project is not.
    from plain_endpoint import PUSH, Endpoint, Refused, table_of
    from plain_stream import Stream


class Driver:
    """Unary RPCs, and the registry of open streams."""

    def __init__(self, defect: str) -> None:
        self.defect = defect
        self.streams: list[Stream] = []
        self.taking_over = threading.Lock()
        self.asked = 0
        self.kept_loads: dict[str, list[Any]] = defaultdict(list)
        self.kept_lock = threading.Lock()
        self.checkpoints: dict[Any, bytes] = {}

    def bad(self, defect: str) -> bool:
        return self.defect == defect

    def endpoint(self, text: str) -> Endpoint:
        return Endpoint(text, self.defect)

    def spec(self, _request: Any) -> Any:
        endpoint = {"type": "object", "properties": {"path": {}, "mode": {}}, "required": ["path"]}
        resource = {"type": "object", "properties": {"table": {}}, "required": ["table"]}
        return pb.SpecResponse(
            endpoint_spec_schema_json="[]" if self.bad("no-schema") else json.dumps(endpoint),
            resource_spec_schema_json=json.dumps(resource),
            documentation_url="https://example.org/plain",
        )

    def validate(self, request: Any) -> Any:
        endpoint = self.endpoint(request.endpoint_spec_json)
        self.asked += 1
        answers = []
        for binding in request.bindings:
            answer = pb.ValidateResponse.Binding(
                resource_path=[table_of(binding.resource_spec_json, endpoint)],
                delta_updates=endpoint.delta_only,
                accepts_delete=endpoint.deletes and not endpoint.bad("hides-deletes"),
                accepts_empty=endpoint.mode != PUSH,
            )
            for each in binding.collection.projections:
                needed = each.ptr in ("", *binding.collection.key_ptrs)
                answer.constraints[each.field].type = (
                    pb.Constraint.LOCATION_REQUIRED
                    if needed
                    else pb.Constraint.LOCATION_RECOMMENDED
                )
                if endpoint.bad("answers-at-random"):
                    answer.constraints[each.field].reason = str(self.asked)
            answers.append(answer)
        if endpoint.bad("validates-backwards"):
            answers.reverse()
        if endpoint.bad("answers-about-none"):
            answers.clear()
        return pb.ValidateResponse(bindings=answers)

    def apply(self, request: Any) -> Any:
        task = request.materialization
        endpoint = self.endpoint(task.endpoint_spec_json)
        fields = {
            table_of(each.resource_spec_json, endpoint): sorted(each.field_selection.values)
            for each in task.bindings
        }
        if len(fields) < len(task.bindings) and not endpoint.bad("binds-twice"):
            raise Refused("a resource is bound twice")
        everything = "".join(name for names in fields.values() for name in names)
        if endpoint.bad("dislikes-odd-fields") and not everything.isalnum():
            raise Refused("a field has an odd name")
        if endpoint.bad("dislikes-odd-tasks") and "'" in task.materialization:
            raise Refused("the materialization has an odd name")
        with endpoint.connect() as db:
            had = db.execute(
                "select version, fields from applied where task = ?", [task.materialization]
            ).fetchone()
            old = json.loads(had[1]) if had else {}
            done = [
                f"create {name}" if name not in old else f"alter {name}"
                for name in fields
                if old.get(name) != fields[name]
            ]
            empties = (
                endpoint.bad("apply-empties")
                or (endpoint.bad("adding-empties") and "alter" in "".join(done))
                or (endpoint.bad("removing-empties") and "alter" in "".join(done))
            )
            if not request.dry_run or endpoint.bad("dry-run-applies"):
                db.execute(
                    "replace into applied values (?, ?, ?)",
                    [task.materialization, request.version, json.dumps(fields)],
                )
                if empties:
                    self.empty(db, fields)
        return pb.ApplyResponse(action_description="; ".join(done))

    def delete(self, request: Any) -> Any:
        task = request.materialization
        endpoint = self.endpoint(task.endpoint_spec_json)
        names = [table_of(each.resource_spec_json, endpoint) for each in task.bindings]
        if not request.dry_run or endpoint.bad("dry-run-deletes"):
            with endpoint.connect() as db:
                if not endpoint.bad("delete-keeps-rows"):
                    self.empty(db, names)
                db.execute("delete from applied where task = ?", [task.materialization])
                if not endpoint.bad("delete-keeps-checkpoint"):
                    db.execute("delete from fences where task = ?", [task.materialization])
        return pb.ApplyResponse(action_description=f"drop {', '.join(names)}")

    def empty(self, db: sqlite3.Connection, names: Any) -> None:
        for name in names:
            db.execute("delete from rows where resource = ?", [name])
            db.execute("delete from pushed where resource = ?", [name])

    def take_over(self, newer: Stream) -> None:
        """End older streams whose key range overlaps."""
        with self.taking_over:
            for older in list(self.streams):
                if newer.ends(older):
                    if newer.bad("waits-for-the-older"):
                        older.over.wait(4)
                    older.requests.put(Refused("another stream has taken over"))
                    if newer.bad("commits-on-cancel"):
                        older.over.wait(4)
            self.streams.append(newer)


def serve(address: str, defect: str) -> None:
    driver = Driver(defect)

    def unary(answer: Any, kind: Any) -> Any:
        def handle(request: Any, context: Any) -> Any:
            try:
                return answer(request)
            except Refused as error:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

        return grpc.unary_unary_rpc_method_handler(
            handle, kind.FromString, lambda found: found.SerializeToString()
        )

    def transactions(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        stream = Stream(driver, requests)
        try:
            for response in stream.run():
                yield response.SerializeToString()
        except Refused as error:
            context.abort(grpc.StatusCode.ABORTED, str(error))

    unlimited = [(f"grpc.max_{each}_message_length", -1) for each in ("send", "receive")]
    server = grpc.server(ThreadPoolExecutor(64), options=[*unlimited, ("grpc.so_reuseport", 0)])
    methods = {
        "Spec": unary(driver.spec, pb.SpecRequest),
        "Validate": unary(driver.validate, pb.ValidateRequest),
        "ApplyUpsert": unary(driver.apply, pb.ApplyRequest),
        "ApplyDelete": unary(driver.delete, pb.ApplyRequest),
        "Transactions": grpc.stream_stream_rpc_method_handler(transactions),
    }
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("materialize.Driver", methods)]
    )
    server.add_insecure_port(address)
    server.start()
    server.wait_for_termination()


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--listen", default="")
    options.add_argument("--defect", default="")
    given = options.parse_args()
    serve(given.listen, given.defect)


if __name__ == "__main__":
    main()

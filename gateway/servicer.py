"""The gateway's gRPC service: the application's methods by the names of gateway.proto."""

from collections.abc import AsyncGenerator, AsyncIterator

import grpc

from fusionkv.gateway.application import Application
from fusionkv.gateway.auth.admission import AdmittedCall
from fusionkv.protos.gateway.v1 import gateway_pb2 as pb
from fusionkv.protos.runtime import rpc

SERVICE = pb.DESCRIPTOR.services_by_name["GatewayService"]


class GatewayServicer:
    """Implements the service of gateway.proto, one method per RPC, for calls that were admitted."""

    def __init__(self, application: Application) -> None:
        self._application = application

    async def Ingest(self, request: pb.IngestRequest, call: AdmittedCall) -> pb.IngestResponse:
        return await self._application.ingest.file(call.tenant, request, call.deadline)

    async def Upload(self, requests: AsyncIterator[pb.UploadRequest], call: AdmittedCall) -> pb.UploadResponse:
        stored = await self._application.ingest.upload(call.tenant, requests, call.deadline)
        return pb.UploadResponse(stored=stored)

    def Precompute(self, request: pb.PrecomputeRequest, call: AdmittedCall) -> AsyncGenerator[pb.PrecomputeResponse]:
        return self._application.precompute.run(call.tenant, request)

    def PlanPrecompute(
        self, request: pb.PlanPrecomputeRequest, call: AdmittedCall
    ) -> AsyncGenerator[pb.PlanPrecomputeResponse]:
        return self._application.precompute.plan(call.tenant, request)

    def Move(self, request: pb.MoveRequest, call: AdmittedCall) -> AsyncGenerator[pb.MoveResponse]:
        return self._application.ingest.move(call.tenant.retrieval, request.corpus)

    async def Delete(self, request: pb.DeleteRequest, call: AdmittedCall) -> pb.DeleteResponse:
        return await self._application.delete(call, request)

    async def List(self, request: pb.ListRequest, call: AdmittedCall) -> pb.ListResponse:
        return await self._application.list(call, request)

    async def Retrieve(self, request: pb.RetrieveRequest, call: AdmittedCall) -> pb.RetrieveResponse:
        return await self._application.retrieve(call, request)

    def Generate(self, request: pb.GenerateRequest, call: AdmittedCall) -> AsyncGenerator[pb.GenerateResponse]:
        return self._application.generate(call, request)

    async def GetModel(self, request: pb.GetModelRequest, call: AdmittedCall) -> pb.GetModelResponse:
        return await self._application.model(call)

    async def Stats(self, request: pb.StatsRequest, call: AdmittedCall) -> pb.StatsResponse:
        return await self._application.stats(call)


def handlers(application: Application) -> grpc.GenericRpcHandler:
    """The service for a gRPC server, which admits each call by its deadline before its request is read."""
    return rpc.handlers(
        SERVICE,
        GatewayServicer(application),
        admit=lambda method, context: application.admission.admitted(method, rpc.deadline(context)),
    )

// A client in Node, straight from the protos: node examples/node/ask.js HOST:PORT CORPUS QUESTION
const path = require("node:path");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const protos = path.join(__dirname, "../../protos");
const definition = loader.loadSync("gateway/v1/gateway.proto", { includeDirs: [protos], defaults: true });
const { GatewayService } = grpc.loadPackageDefinition(definition).gateway.v1;

const [address = "127.0.0.1:7072", corpus, question] = process.argv.slice(2);
if (!corpus || !question) {
  console.error("usage: node ask.js HOST:PORT CORPUS QUESTION");
  process.exit(2);
}

// With TLS: grpc.credentials.createSsl(fs.readFileSync("ca.crt")).
const client = new GatewayService(address, grpc.credentials.createInsecure());
const metadata = new grpc.Metadata();
if (process.env.FUSIONKV_TOKEN) metadata.set("authorization", `Bearer ${process.env.FUSIONKV_TOKEN}`);
const deadline = Date.now() + 60_000;

const answer = client.Generate({ corpus, question, sampling: { maxTokens: 16 } }, metadata, { deadline });
answer.on("data", ({ sources, token, summary }) => {
  if (sources) console.log("from:", sources.passages.map((p) => p.document).join(", "));
  if (token) process.stdout.write(token.text);
  if (summary) console.log(`\nfirst token after ${(1000 * summary.seconds.ttft).toFixed(1)} ms`);
});
answer.on("error", (error) => {
  console.error(`${grpc.status[error.code]}: ${error.details}`);
  if (error.code === grpc.status.UNAVAILABLE) console.error(`start a gateway at ${address}: fusionkv serve all`);
  process.exitCode = 1;
});
answer.on("end", () => client.close());

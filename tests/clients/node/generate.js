// A client of specdec.v1.GenerationService that shares no code with the service: it loads the published proto files as they are.
//
//   node generate.js HOST:PORT PROTO_DIR < jobs.json
//
// jobs: a JSON list of {"method", "request", "cancelAfter"}; `cancelAfter` = tokens after which a stream is cancelled. All run at once.
// Prints a JSON list in the same order: what arrived of answer 0, the same of the `others` (n > 1), and the status.

import { readFileSync } from "node:fs";
import path from "node:path";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const [endpoint, protoDir] = process.argv.slice(2);
const definition = protoLoader.loadSync(path.join(protoDir, "specdec/v1/generation.proto"), {
  includeDirs: [protoDir],
  keepCase: true,
  longs: String, // a seed has 64 bits, a number 53
  enums: String,
  defaults: true,
  oneofs: true,
});
const { GenerationService } = grpc.loadPackageDefinition(definition).specdec.v1;
const client = new GenerationService(endpoint, grpc.credentials.createInsecure());
const deadline = () => new Date(Date.now() + 60_000);

function status(error) {
  return { code: error?.code ?? 0, name: grpc.status[error?.code ?? 0], details: error?.details ?? "" };
}

function fresh() {
  return { token_ids: [], text: "", logprobs: [], prompt_logprobs: [], origins: [], kinds: [], deltas: 0 };
}

function generate({ request, cancelAfter }) {
  return new Promise((resolve) => {
    const answers = [fresh()]; // by index
    const told = (error) => ({ ...answers[0], others: answers.slice(1), status: status(error) });
    const call = client.Generate(request, { deadline: deadline() });
    call.on("data", (message) => {
      const got = (answers[message.index] ??= fresh());
      got.kinds.push(message.event);
      if (message.event === "started") got.started = message.started;
      if (message.event === "finished") got.finished = message.finished;
      if (message.event !== "delta") return;
      got.deltas += 1;
      got.token_ids.push(...message.delta.token_ids);
      got.text += message.delta.text;
      got.logprobs.push(...message.delta.logprobs);
      got.prompt_logprobs.push(...message.delta.prompt_logprobs);
      got.origins.push(...message.delta.origins);
      if (cancelAfter && got.token_ids.length >= cancelAfter) call.cancel();
    });
    call.on("error", (error) => resolve(told(error)));
    call.on("end", () => setImmediate(() => resolve(told(null))));
  });
}

function unary({ method, request }) {
  return new Promise((resolve) => {
    client[method](request, { deadline: deadline() }, (error, reply) => resolve({ reply, status: status(error) }));
  });
}

const jobs = JSON.parse(readFileSync(0, "utf8"));
const answers = await Promise.all(jobs.map((job) => ((job.method ?? "Generate") === "Generate" ? generate(job) : unary(job))));
process.stdout.write(JSON.stringify(answers));
client.close();

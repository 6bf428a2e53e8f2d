// Streams an answer from a NeoFlex server. Usage: see ../README.md.
"use strict";

const fs = require("fs");
const path = require("path");
const { parseArgs } = require("util");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const MIB = 2 ** 20;
const CHANNEL_OPTIONS = {
  "grpc.max_receive_message_length": 64 * MIB, // gRPC's default is 4 MiB.
  "grpc.max_send_message_length": 64 * MIB,
  "grpc.keepalive_time_ms": 10000, // So that no proxy takes a stream that waits for its turn for dead.
  "grpc.keepalive_timeout_ms": 10000,
  "grpc.keepalive_permit_without_calls": 1,
};
const GOOGLE_PROTOS = process.env.NEOFLEX_GOOGLE_PROTOS;

function load(files, directories) {
  return loader.loadSync(files, {
    keepCase: true,
    enums: String,
    longs: Number,
    oneofs: true,
    arrays: true,
    defaults: true, // An absent text is empty, an absent number 0.
    includeDirs: directories,
  });
}

function connect(address) {
  const definition = load("neoflex/v1/inference.proto", [path.join(__dirname, "..", "..", "proto")]);
  const { InferenceService } = grpc.loadPackageDefinition(definition).neoflex.v1;
  return new InferenceService(address, grpc.credentials.createInsecure(), CHANNEL_OPTIONS);
}

function callOptions(seconds) {
  return seconds === undefined ? {} : { deadline: Date.now() + seconds * 1000 };
}

async function stream(client, request, options) {
  const call = client.GenerateStream({ request }, callOptions(options.timeout));
  let numTokens = 0;
  try {
    for await (const message of call) {
      if (message.event === "started") {
        console.error(`request ${message.started.request_id}: ${message.started.prompt_tokens} tokens in`);
      } else if (message.event === "delta") {
        process.stdout.write(message.delta.text);
        numTokens += message.delta.token_ids.length;
        if (options.cancelAfter !== undefined && numTokens >= options.cancelAfter) call.cancel();
      } else {
        const { finish, usage } = message.finished;
        console.error(`\n${usage.completion_tokens} tokens out: ${finish.reason}`);
      }
    }
  } catch (error) {
    if (error.code !== grpc.status.CANCELLED) throw error;
    console.error(`\ncancelled after ${numTokens} tokens`);
  }
}

function call(client, method, request) {
  return new Promise((resolve, reject) => {
    client[method](request, (error, answer) => (error ? reject(error) : resolve(answer)));
  });
}

async function roundTrip(client, file) {
  const text = fs.readFileSync(file, "utf8");
  const tokens = (await call(client, "Tokenize", { text })).token_ids;
  const back = (await call(client, "Detokenize", { token_ids: tokens })).text;
  const outcome = back === text ? "the same text" : "another text";
  console.log(`${Buffer.byteLength(text)} bytes, ${tokens.length} tokens, ${outcome}`);
}

function describe(error) {
  if (!(error.code in grpc.status)) return [error.stack]; // Ours, not the server's.
  const lines = [`error: ${grpc.status[error.code]}: ${error.details}`];
  const [packed] = error.metadata?.get("grpc-status-details-bin") ?? [];
  if (!packed || !GOOGLE_PROTOS) return lines;
  const types = load(["google/rpc/status.proto", "google/rpc/error_details.proto"], [GOOGLE_PROTOS]);
  const parse = (type, bytes) => types[type].deserialize(bytes);
  for (const detail of parse("google.rpc.Status", packed).details ?? []) {
    const type = detail.type_url.split("/").pop();
    const value = parse(type, detail.value);
    if (type === "google.rpc.ErrorInfo") lines.push(`reason: ${value.reason}`);
    for (const { field, description } of value.field_violations ?? []) lines.push(`field ${field}: ${description}`);
    if (type === "google.rpc.RetryInfo") {
      lines.push(`try again in ${value.retry_delay.seconds + value.retry_delay.nanos / 1e9} s`);
    }
  }
  return lines;
}

async function main() {
  const string = { type: "string" };
  const { values, positionals } = parseArgs({
    allowPositionals: true,
    options: {
      raw: { type: "boolean" },
      "max-tokens": string,
      temperature: string,
      timeout: string,
      "cancel-after": string,
      "round-trip": string,
    },
  });
  const [address, prompt] = positionals;
  const number = (name) => (values[name] === undefined ? undefined : Number(values[name]));
  const client = connect(address);
  try {
    if (values["round-trip"]) return await roundTrip(client, values["round-trip"]);
    const input = values.raw ? { text: prompt } : { chat: { messages: [{ role: "user", content: prompt }] } };
    const request = {
      ...input,
      sampling: { temperature: number("temperature") },
      stopping: { max_tokens: number("max-tokens") },
    };
    await stream(client, request, { timeout: number("timeout"), cancelAfter: number("cancel-after") });
  } finally {
    client.close();
  }
}

main().catch((error) => {
  console.error(describe(error).join("\n"));
  process.exitCode = 1;
});

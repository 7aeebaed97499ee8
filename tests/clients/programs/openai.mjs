// The official client of npm: chat, streaming, tools, structured output and responses. Prints one JSON object.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.env.KVD_TEST_URL, apiKey: process.env.KVD_TEST_KEY, maxRetries: 0 });
const model = process.env.KVD_TEST_MODEL;
const messages = [{ role: "user", content: "Tell me the capital of France." }];
const greedy = { model, temperature: 0 };
const parameters = {
  type: "object",
  properties: { city: { type: "string", enum: ["Paris", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
};
const results = {};

const whole = await client.chat.completions.create({ ...greedy, messages, max_completion_tokens: 24 });
results.whole = whole.choices[0].message.content;

let streamed = "";
let usage = null;
const chunks = await client.chat.completions.create({
  ...greedy,
  messages,
  max_completion_tokens: 24,
  stream: true,
  stream_options: { include_usage: true },
});
for await (const chunk of chunks) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
results.streamed = streamed;
results.isUsageSame = usage.total_tokens === whole.usage.total_tokens;

const called = await client.chat.completions.create({
  ...greedy,
  messages,
  max_completion_tokens: 100,
  tools: [{ type: "function", function: { name: "weather", parameters } }],
  tool_choice: "required",
});
results.call = called.choices[0].message.tool_calls[0].function;

const response = await client.responses.create({ ...greedy, input: messages, max_output_tokens: 24 });
results.response = response.output_text;

const events = client.responses.stream({
  ...greedy,
  input: messages,
  max_output_tokens: 100,
  text: { format: { type: "json_schema", name: "place", schema: parameters, strict: true } },
});
results.structured = (await events.finalResponse()).output_text;

try {
  await client.chat.completions.create({ model: "absent", messages });
} catch (error) {
  results.error = { status: error.status, code: error.code };
}
console.log(JSON.stringify(results));

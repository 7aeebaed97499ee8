// Vercel's AI SDK through its provider for OpenAI-compatible servers. Prints one JSON object.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamText, tool } from "ai";
import { z } from "zod";

const kvd = createOpenAICompatible({
  name: "kvd",
  baseURL: process.env.KVD_TEST_URL,
  apiKey: process.env.KVD_TEST_KEY,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const model = kvd(process.env.KVD_TEST_MODEL);
const settings = { model, prompt: "Tell me the capital of France.", temperature: 0, maxRetries: 0 };
const place = z.object({ city: z.enum(["Paris", "Rome"]) });
const results = {};

const whole = await generateText({ ...settings, maxOutputTokens: 24 });
results.whole = whole.text;

const stream = streamText({ ...settings, maxOutputTokens: 24 });
results.streamed = "";
for await (const piece of stream.textStream) results.streamed += piece;
results.isUsageSame = (await stream.usage).totalTokens === whole.usage.totalTokens;
results.finishReason = await stream.finishReason;

const called = streamText({
  ...settings,
  maxOutputTokens: 100,
  tools: { weather: tool({ description: "The weather of a city", inputSchema: place }) },
  toolChoice: "required",
});
results.calls = (await called.toolCalls).map(({ toolName, input }) => ({ toolName, input }));

results.object = (await generateObject({ ...settings, schema: place, maxOutputTokens: 100 })).object;

try {
  await generateText({ ...settings, model: kvd("absent") });
} catch (error) {
  results.error = { status: error.statusCode, message: error.message };
}
console.log(JSON.stringify(results));

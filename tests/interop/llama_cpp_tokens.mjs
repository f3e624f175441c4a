// Token ids by llama.cpp (npm package node-llama-cpp): node llama_cpp_tokens.mjs MODEL.gguf texts.json ids.json
import fs from "node:fs";
import {getLlama} from "node-llama-cpp";

const [modelPath, textsPath, idsPath] = process.argv.slice(2);
const llama = await getLlama({gpu: false, build: "never"});
const model = await llama.loadModel({modelPath});
const texts = JSON.parse(fs.readFileSync(textsPath, "utf8"));
fs.writeFileSync(idsPath, JSON.stringify(texts.map((text) => Array.from(model.tokenize(text, true)))));
await model.dispose();

/** A conversation as a file. */

import { branch, type Conversation, type Message } from './conversation';

function section(message: Message): string {
  if (message.role === 'tool') return `### Result of a tool\n\n\`\`\`json\n${message.text}\n\`\`\``;
  const who = message.role === 'user' ? '## You' : `## ${message.model || 'Model'}`;
  const thought = message.reasoning
    ? [`<details><summary>Reasoning</summary>\n\n${message.reasoning}\n\n</details>`]
    : [];
  const calls = (message.calls ?? []).map(
    (call) => `\`\`\`json\n${call.name}(${call.arguments})\n\`\`\``,
  );
  const pictures = (message.images ?? []).map((url, n) => `![Picture ${n + 1}](${url})`);
  return [who, ...thought, ...pictures, message.text, ...calls].filter(Boolean).join('\n\n');
}

/** The branch that is shown. */
export function markdown(conversation: Conversation): string {
  const { system } = conversation.settings;
  const before = system.trim() ? [`> ${system.trim().replaceAll('\n', '\n> ')}`] : [];
  const texts = [`# ${conversation.title}`, ...before, ...branch(conversation).map(section)];
  return `${texts.join('\n\n')}\n`;
}

/** The whole tree. */
export function json(conversation: Conversation): string {
  return `${JSON.stringify(conversation, null, 2)}\n`;
}

export function download(name: string, content: string, kind: string): void {
  const link = document.createElement('a');
  link.href = URL.createObjectURL(new Blob([content], { type: kind }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

"""Chat templates in the manner of public model families, written for tests; see tests/templates.py.

True to the structure of the families: what opens and closes a turn, what is trimmed, merged, dropped or refused, where tools
go. `<G>` and `</G>` stand where `{% generation %}` markers would.
"""

_QWEN_TOOLS = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- '# Tools\n\nYou may call these functions:\n<tools>' }}
    {%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\n</tools>\n\nFor each call write <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
"""
_QWEN_TOOL_RESULT = r"""
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
"""
CHATML = (
    _QWEN_TOOLS
    + r"""
{%- for m in messages %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        <G>
        {{- m.content }}
        {%- for call in m.tool_calls or [] %}
            {{- '\n' if m.content or not loop.first else '' }}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
        </G>
        {{- '\n' }}
"""
    + _QWEN_TOOL_RESULT
    + r"""
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
)

# Reasoning of turns before the last question is taken out; the last answer gets a block, if an empty one.
QWEN3 = (
    _QWEN_TOOLS
    + r"""
{%- set ns = namespace(open=true, last=messages | length - 1) %}
{%- for m in messages[::-1] %}
    {%- set index = messages | length - 1 - loop.index0 %}
    {%- if ns.open and m.role == 'user' and not (m.content.startswith('<tool_response>')
        and m.content.endswith('</tool_response>')) %}
        {%- set ns.open = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set content = m.content %}
        {%- set reasoning = '' %}
        {%- if m.reasoning_content is string %}
            {%- set reasoning = m.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        <G>
        {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
            {{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for call in m.tool_calls or [] %}
            {{- '\n' if content or not loop.first else '' }}
            {%- set call = call.function or call %}
            {{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
        </G>
        {{- '\n' }}
"""
    + _QWEN_TOOL_RESULT
    + r"""
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}
"""
)

# Contents are trimmed; a system block with the date of the day is always there; tools stand in the first user turn.
LLAMA3 = r"""
{{- bos_token }}
{%- if date_string is not defined %}{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}
{%- if messages[0].role == 'system' %}
    {%- set system, messages = messages[0].content | trim, messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
{%- if tools %}{{- 'Environment: ipython\n' }}{%- endif %}
{{- 'Cutting Knowledge Date: December 2023\nToday Date: ' + date_string + '\n\n' + system + '<|eot_id|>' }}
{%- if tools %}
    {%- if not messages or messages[0].role != 'user' %}
        {{- raise_exception('tools need a first user message') }}
    {%- endif %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\nAnswer with a JSON function call.\n\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) + '\n\n' }}{%- endfor %}
    {{- messages[0].content | trim + '<|eot_id|>' }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for m in messages %}
    {%- if m.tool_calls %}
        {%- if m.tool_calls | length != 1 %}{{- raise_exception('one tool call at a time') }}{%- endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
        <G>
        {{- '{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson + '}' }}
        {{- '<|eot_id|>' }}
        </G>
    {%- elif m.role == 'assistant' %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
        <G>
        {{- m.content | trim + '<|eot_id|>' }}
        </G>
    {%- elif m.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + m.content | tojson + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}
"""

# The assistant is called model; roles alternate; version 3 puts the system prompt into the first user turn, 2 refuses it.
_GEMMA = r"""
{%- for m in messages %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant') }}
    {%- endif %}
    {%- if m.role == 'assistant' %}
        {{- '<start_of_turn>model\n' }}
        <G>
        {{- m.content | trim + '<end_of_turn>' }}
        </G>
        {{- '\n' }}
    {%- else %}
        {{- '<start_of_turn>' + m.role + '\n' + (system if loop.first else '') + m.content | trim + '<end_of_turn>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}
"""
GEMMA2 = (
    r"""
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}
{%- set system = '' %}
"""
    + _GEMMA
)
GEMMA3 = (
    r"""
{{- bos_token }}
{%- set system = '' %}
{%- if messages[0].role == 'system' %}
    {%- set system, messages = messages[0].content + '\n\n', messages[1:] %}
{%- endif %}
"""
    + _GEMMA
)

# Version 3 writes the system prompt only where the conversation ends with the user: a training row loses it.
_MISTRAL = r"""
{%- set ns = namespace(index=0, asked=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
        {%- if (m.role == 'user') != (ns.index % 2 == 0) %}
            {{- raise_exception('After the optional system message, roles must alternate user/assistant') }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
    {%- if m.role == 'user' %}{%- set ns.asked = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- if tools and loop.index0 == ns.asked %}
            {{- '[AVAILABLE_TOOLS]' + SPACE + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST]' + SPACE + (system + '\n\n' if loop.last and system else '') + m.content + '[/INST]' }}
    {%- elif m.role == 'assistant' %}
        <G>
        {%- if m.tool_calls %}
            {{- '[TOOL_CALLS]' + SPACE + '[' }}
            {%- for call in m.tool_calls %}
                {%- if call.id is not defined or call.id | length != 9 %}
                    {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
                {%- endif %}
                {{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
                {{- ', "id": "' + call.id + '"}' + (', ' if not loop.last else '') }}
            {%- endfor %}
            {{- ']' + eos_token }}
        {%- else %}
            {{- SPACE + (m.content | trim if SPACE else m.content) + eos_token }}
        {%- endif %}
        </G>
    {%- elif m.role == 'tool' %}
        {{- '[TOOL_RESULTS]' + SPACE + '{"content": ' + m.content | tojson + ', "call_id": "' + m.tool_call_id + '"}' }}
        {{- '[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception('Only user, assistant and tool roles are supported') }}
    {%- endif %}
{%- endfor %}
"""
MISTRAL3 = (
    r"""
{{- bos_token }}
{%- set SPACE, system = ' ', '' %}
{%- if messages[0].role == 'system' %}{%- set system, messages = messages[0].content, messages[1:] %}{%- endif %}
"""
    + _MISTRAL
)
MISTRAL7 = (
    r"""
{{- bos_token }}
{%- set SPACE, system = '', '' %}
{%- if messages[0].role == 'system' %}
    {{- '[SYSTEM_PROMPT]' + messages[0].content + '[/SYSTEM_PROMPT]' }}
    {%- set messages = messages[1:] %}
{%- endif %}
"""
    + _MISTRAL
)

# All system prompts stand in front without a role; eos closes every answer; arguments of calls must be text. No <|Assistant|>
# between a tool's output and the answer. R1 opens <think> in the generation prompt and never writes it in a rendering.
_DEEPSEEK = r"""
{%- set ns = namespace(tool=false, system='') %}
{%- for m in messages %}
    {%- if m.role == 'system' %}
        {%- set ns.system = ns.system + ('\n\n' if ns.system else '') + m.content %}
    {%- endif %}
{%- endfor %}
{{- bos_token + ns.system }}
{%- if tools %}{{- '\n\n## Tools\n' + tools | tojson }}{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- set ns.tool = false %}
        {{- '<｜User｜>' + m.content }}
    {%- elif m.role == 'assistant' %}
        {%- set content = m.content.split('</think>')[-1] if STRIPS else m.content %}
        {{- '<｜tool▁outputs▁end｜>' if ns.tool else '<｜Assistant｜>' }}
        {%- set ns.tool = false %}
        <G>
        {{- content }}
        {%- for call in m.tool_calls or [] %}
            {{- '<｜tool▁calls▁begin｜>' if loop.first else '\n' }}
            {{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name + '\n```json\n' }}
            {{- call.function.arguments + '\n```<｜tool▁call▁end｜>' }}
            {{- '<｜tool▁calls▁end｜>' if loop.last else '' }}
        {%- endfor %}
        {{- '<｜end▁of▁sentence｜>' }}
        </G>
    {%- elif m.role == 'tool' %}
        {{- '\n' if ns.tool else '<｜tool▁outputs▁begin｜>' }}
        {%- set ns.tool = true %}
        {{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
    {%- endif %}
{%- endfor %}
{%- if ns.tool %}{{- '<｜tool▁outputs▁end｜>' }}{%- endif %}
"""
DEEPSEEK3 = (
    "{%- set STRIPS = false %}"
    + _DEEPSEEK
    + "{%- if add_generation_prompt and not ns.tool %}{{- '<｜Assistant｜>' }}{%- endif %}"
)
DEEPSEEK_R1 = (
    "{%- set STRIPS = true %}"
    + _DEEPSEEK
    + "{%- if add_generation_prompt and not ns.tool %}{{- '<｜Assistant｜><think>\\n' }}{%- endif %}"
)

# An eos behind the last turn where no generation prompt is; neither tools nor tool turns.
PHI3 = r"""
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|assistant|>\n' }}
        <G>
        {{- m.content + '<|end|>' }}
        </G>
        {{- '\n' }}
    {%- elif m.role in ('system', 'user') %}
        {{- '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}
    {%- endif %}
{%- endfor %}
{{- '<|assistant|>\n' if add_generation_prompt else eos_token }}
"""

# No end-of-turn token: the next role token ends a turn. The newline behind the role is not in the generation prompt.
GLM4 = r"""
{{- '[gMASK]<sop>' }}
{%- if tools %}
    {{- '<|system|>\n# Tools\n' }}
    {%- for tool in tools %}{{- '\n## ' + tool.function.name + '\n\n' + tool | tojson(indent=4) }}{%- endfor %}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|assistant|>' }}
        <G>
        {%- for call in m.tool_calls or [] %}
            {{- call.function.name + '\n' + call.function.arguments | tojson }}
        {%- else %}
            {{- '\n' + m.content }}
        {%- endfor %}
        </G>
    {%- else %}
        {{- '<|' + ('observation' if m.role == 'tool' else m.role) + '|>\n' + m.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""

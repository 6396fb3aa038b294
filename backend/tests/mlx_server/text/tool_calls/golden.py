"""Two calls in each format, one with arguments and one without."""

GOLDEN = {
    "deepseek-4": """\
<｜DSML｜tool_calls>
<｜DSML｜invoke name="get_weather">
<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>
<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>
</｜DSML｜invoke>
<｜DSML｜invoke name="now">
</｜DSML｜invoke>
</｜DSML｜tool_calls>""",
    "deepseek-3.2": """\
<｜DSML｜function_calls>
<｜DSML｜invoke name="get_weather">
<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>
<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>
</｜DSML｜invoke>
<｜DSML｜invoke name="now">
</｜DSML｜invoke>
</｜DSML｜function_calls>""",
    "deepseek": """\
<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
```json
{"city": "Paris", "days": 2}
```<｜tool▁call▁end｜>
<｜tool▁call▁begin｜>function<｜tool▁sep｜>now
```json
{}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>""",
    "deepseek-3.1": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris",'
        ' "days": 2}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>"
    ),
    "phi-4": (
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}},'
        ' {"name": "now", "arguments": {}}]<|/tool_call|>'
    ),
    "granite": (
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}},'
        ' {"name": "now", "arguments": {}}]'
    ),
    "seed-oss": """\
<seed:tool_call>
<function=get_weather>
<parameter=city>Paris</parameter>
<parameter=days>2</parameter>
</function>
</seed:tool_call>
<seed:tool_call>
<function=now>
</function>
</seed:tool_call>""",
    "command": """\
<|START_ACTION|>[
    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Paris", "days": 2}},
    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}
]<|END_ACTION|>""",
    "hunyuan": """\
<tool_calls><tool_call>get_weather
```json
{"city": "Paris", "days": 2}
```</tool_call><tool_call>now
```json
{}
```</tool_call></tool_calls>""",
    "tool-calls": (
        '<tool_calls>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}, '
        '{"name": "now", "arguments": {}}]</tool_calls>'
    ),
    "olmo-3": """\
<function_calls>get_weather(city="Paris", days=2)
now()</function_calls>""",
    "apertus": (
        '<|tools_prefix|>[{"get_weather": {"city": "Paris", "days": 2}}, {"now": {}}]'
        "<|tools_suffix|>"
    ),
    "internlm": """\
<|action_start|><|plugin|>
{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}<|action_end|><|action_start|><|plugin|>
{"name": "now", "parameters": {}}<|action_end|>""",
    "nemotron": (
        '<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}, '
        '{"name": "now", "arguments": {}}]</TOOLCALL>'
    ),
    "hermes": """\
<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}
</tool_call>
<tool_call>
{"name": "now", "arguments": {}}
</tool_call>""",
    "mistral-args": '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 2}[TOOL_CALLS]now[ARGS]{}',
    "mistral": (
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}, '
        '{"name": "now", "arguments": {}}]'
    ),
    "harmony": (
        ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris",'
        ' "days": 2}<|call|><|start|>assistant to=functions.now<|channel|>commentary json'
        "<|message|>{}"
    ),
    "glm-4.7": """\
<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value><arg_key>days</arg_key><arg_value>2</arg_value></tool_call>
<tool_call>now</tool_call>""",
    "glm": """\
<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>Paris</arg_value>
<arg_key>days</arg_key>
<arg_value>2</arg_value>
</tool_call>
<tool_call>now
</tool_call>""",
    "longcat": """\
<longcat_tool_call>get_weather
<longcat_arg_key>city</longcat_arg_key>
<longcat_arg_value>Paris</longcat_arg_value>
<longcat_arg_key>days</longcat_arg_key>
<longcat_arg_value>2</longcat_arg_value>
</longcat_tool_call>
<longcat_tool_call>now
</longcat_tool_call>""",
    "qwen3-coder": """\
<tool_call>
<function=get_weather>
<parameter=city>
Paris
</parameter>
<parameter=days>
2
</parameter>
</function>
</tool_call>
<tool_call>
<function=now>
</function>
</tool_call>""",
    "minimax": """\
<minimax:tool_call>
<invoke name="get_weather">
<parameter name="city">Paris</parameter>
<parameter name="days">2</parameter>
</invoke>
<invoke name="now">
</invoke>
</minimax:tool_call>""",
    "minicpm": (
        '<function name="get_weather"><param name="city">Paris</param><param name="days">2'
        '</param></function><function name="now"></function>'
    ),
    "muse-spark": """\
to=functions<|message|><atem:function_calls>
<atem:invoke name="get_weather">
<atem:parameter name="city">Paris</atem:parameter>
<atem:parameter name="days">2</atem:parameter>
</atem:invoke>
<atem:invoke name="now">
</atem:invoke>
</atem:function_calls>""",
    "kimi-k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        '<|tool_call_argument_begin|>{"city": "Paris", "days": 2}<|tool_call_end|>'
        "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>"
    ),
    "kimi-k3": (
        '<|open|>tools<|sep|><|open|>call tool="get_weather" index="0"<|sep|>'
        '<|open|>argument key="city" type="string"<|sep|>Paris<|close|>argument<|sep|>'
        '<|open|>argument key="days" type="integer"<|sep|>2<|close|>argument<|sep|>'
        '<|close|>call<|sep|><|open|>call tool="now" index="1"<|sep|><|close|>call<|sep|>'
        "<|close|>tools<|sep|>"
    ),
    "gemma-4": (
        '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:2}<tool_call|>'
        "<|tool_call>call:now{}<tool_call|>"
    ),
    "function-gemma": (
        "<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:2}"
        "<end_function_call><start_function_call>call:now{}<end_function_call>"
    ),
    "lfm-2": '<|tool_call_start|>[get_weather(city="Paris", days=2), now()]<|tool_call_end|>',
    "llama": """\
{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}
{"name": "now", "parameters": {}}""",
    "generic": """\
<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}
</tool_call>
<tool_call>
{"name": "now", "arguments": {}}
</tool_call>""",
}

"""Steps of the common decoder with as few launches as it takes.

The common decoder is pre-norm with rotary attention and a gated MLP: Llama, Mistral, Qwen 2 and 3,
Phi-3 and their kin, which differ in data (biases, norms of q and k, tied heads, kinds of rotation,
windows), Gemma 2 and 3, which have norms behind attention and MLP, too, another activation and, the
former, soft caps, Gemma 4 (values that are normed, results that are scaled, inputs of each layer's
own, layers that attend to earlier ones' keys and values), and Qwen 3 MoE, Mixtral, GPT-OSS, GLM 4.5
MoE, Dots, ERNIE 4.5 and their kin, whose layers have experts in the MLP's place, or beside it as
Gemma 4 26B A4B's have, on NVIDIA GPUs alone (`products`). mlx-lm's modules spend some fifteen
launches on each layer of it. Here a layer is eight: norm, one product for q, k and v, attention
(which normalises and rotates the heads, stores the new token in its page and attends), output
product with the residual added, norm, one product for gate and up, activation, down product with
the residual added. On an NVIDIA GPU and with few rows it is five, since norms and activation become
part of the products (see `products`), and with very few it is two: attention, and all products from
there to the next layer's. A norm behind a product takes whole rows of it: it, the sum and the norm
that follows are one launch, so that such a layer is seven, whatever the rows up to 32; ten where
experts lie beside its MLP. With chunks of prompts in a step, attention is up to four launches: what
it does first becomes one of its own, and rows and chunks are attended by different kernels.

`FusedDecoder.build` makes it from a loaded module, whose weights become views of the joined ones,
so that the module goes on working and nothing exists twice, but for what is packed and dense, too
(`models.weights`). Whether the result is right is not assumed from names but measured: `check`
compares its logits with the module's own.
"""

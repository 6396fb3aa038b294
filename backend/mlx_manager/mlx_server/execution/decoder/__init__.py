"""Steps of the common decoder with as few launches as possible.

The common decoder is pre-norm with rotary attention and a gated MLP. These models are common
decoders:

* Llama, Mistral, Qwen 2 and 3, Phi-3 and their kin, which differ in data: biases, norms of q and k,
  tied heads, kinds of rotation, windows.
* Gemma 2 and 3, which have norms behind attention and MLP, too, and another activation.
  Gemma 2 also has soft caps.
* Gemma 4: values that are normed, results that are scaled, inputs of each layer's own, layers that
  attend to earlier ones' keys and values.
* Qwen 3 MoE, Mixtral, GPT-OSS, GLM 4.5 MoE, Dots, ERNIE 4.5 and their kin, on NVIDIA GPUs alone
  (`cuda.matmul`). Their layers have experts in the MLP's place, or beside it as those of Gemma 4
  26B A4B have.

mlx-lm's modules spend some fifteen launches on each layer. Here a layer is eight: norm, one product
for q, k and v, attention (which normalises and rotates the heads, stores the new token in its page
and attends), output product with the residual added, norm, one product for gate and up, activation,
down product with the residual added. On an NVIDIA GPU and with few rows a layer is five launches,
since norms and activation become part of the products (see `cuda.matmul`). With very few rows it is
two: attention, and all products from there to the next layer's. A norm behind a product takes whole
rows of the product: the norm, the sum and the norm that follows are one launch, so that such a
layer is seven, whatever the rows up to 32; ten where experts lie beside its MLP. With chunks of
prompts in a step, attention is up to four launches: rotating and writing the heads becomes one of
its own, and rows and chunks are attended by different kernels.

`FusedDecoder.build` makes the decoder from a loaded module, whose weights become views of the
joined ones. So the module goes on working and nothing exists twice, except weights that are stored
both packed and dense (`weights`). `check` compares the decoder's logits with the module's
own: whether the result is right is measured, not assumed from names.
"""

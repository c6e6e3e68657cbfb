"""The README's example: shuffled batches of images and labels from tar shards, as PyTorch tensors.

Expects shards as WebDataset writes them, with members `NAME.jpg` and `NAME.cls`, below `s3://bucket/train/`; credentials,
region and endpoint come from the AWS variables and files. Needs: penstock's extras `torch` and `image`
"""

import penstock as ps

pipeline = (
    ps.shards("s3://bucket/train/")  # a prefix, a pattern, or a list; nothing is opened yet
    .shuffle(window=16384, seed=0)
    .decode(ps.Image("jpg", height=224, width=224), ps.Integer("cls"))
    .batch(32)
)
with ps.Loader(pipeline) as loader:
    for epoch in loader.epochs(2):
        for batch in ps.torch.Tensors(loader):  # {"jpg": uint8[32, 224, 224, 3], "cls": int64[32], "__key__": [...]}
            print(epoch, batch["jpg"].shape, batch["cls"][:4].tolist())
    print(loader.statistics().bottleneck)  # what limits the speed; "consumer" means that the data keeps up

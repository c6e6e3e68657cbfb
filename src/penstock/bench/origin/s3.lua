-- What nginx itself does not do of S3: the first-byte delay, random 503s, ListObjectsV2, and canned answers to writes.
-- GET and HEAD of objects fall through to nginx's static files, which know ranges and conditions.
local s3 = { buckets = {} }

local function tail(size, etag)
  return "</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>&quot;" .. etag .. "&quot;</ETag><Size>" .. size
    .. "</Size><StorageClass>STANDARD</StorageClass></Contents>"
end

-- One bucket is {keys = {sorted}, tails = {xml}}, from a file of lines "key<TAB>size<TAB>etag" in byte order (LuaJIT compares bytes too).
function s3.load(folder, ttfb_s, ttfb_sigma, error_503, lists_writes)
  s3.ttfb_s, s3.ttfb_sigma, s3.error_503, s3.lists_writes = ttfb_s, ttfb_sigma, error_503, lists_writes
  for name in io.lines(folder .. "/buckets") do
    local keys, tails = {}, {}
    for line in io.lines(folder .. "/" .. name .. ".tsv") do
      local key, size, etag = line:match("^(.-)\t(%d+)\t(.+)$")
      keys[#keys + 1] = key
      tails[#tails + 1] = tail(size, etag)
    end
    s3.buckets[name] = { keys = keys, tails = tails }
  end
end

function s3.refuse(status, code, message)
  ngx.status = status
  ngx.header["Content-Type"] = "application/xml"
  ngx.print('<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>', code, "</Code><Message>", message,
    "</Message><Resource>", s3.xml(ngx.var.uri), "</Resource><RequestId>", ngx.var.request_id, "</RequestId></Error>")
  return ngx.exit(status)
end

local ENTITIES = { ["&"] = "&amp;", ["<"] = "&lt;", [">"] = "&gt;", ['"'] = "&quot;", ["\r"] = "&#13;" }
function s3.xml(text) return (text:gsub('[&<>"\r]', ENTITIES)) end
local function url(text) return (text:gsub("[^%w%-_%.~/]", function(c) return ("%%%02X"):format(c:byte()) end)) end

-- First index whose key is >= wanted.
local function lower_bound(keys, wanted)
  local low, high = 1, #keys + 1
  while low < high do
    local middle = math.floor((low + high) / 2)
    if keys[middle] < wanted then low = middle + 1 else high = middle end
  end
  return low
end

-- First index at or past `from` whose key does not begin with `prefix`: keys with a prefix lie together.
local function past_prefix(keys, prefix, from)
  local low, high = from, #keys + 1
  while low < high do
    local middle = math.floor((low + high) / 2)
    if keys[middle]:sub(1, #prefix) == prefix then low = middle + 1 else high = middle end
  end
  return low
end

-- A token is base64 of "k" .. the last key, or "p" .. the last common prefix, that the page before gave.
local function start_index(keys, args, prefix)
  local token = args["continuation-token"] and ngx.decode_base64(args["continuation-token"])
  if args["continuation-token"] and not token then return nil end
  local first = lower_bound(keys, prefix)
  if token and token:sub(1, 1) == "p" then return math.max(first, past_prefix(keys, token:sub(2), lower_bound(keys, token:sub(2)))) end
  local after = token and token:sub(2) or args["start-after"]
  if not after or after == "" then return first end
  local index = lower_bound(keys, after)
  if keys[index] == after then index = index + 1 end
  return math.max(first, index)
end

function s3.list(name, args)
  local bucket = s3.buckets[name]
  if not bucket then return s3.refuse(404, "NoSuchBucket", "The specified bucket does not exist.") end
  local keys, tails = bucket.keys, bucket.tails
  local prefix, delimiter = args.prefix or "", args.delimiter or ""
  if prefix == true then prefix = "" end
  if delimiter == true then delimiter = "" end
  local most = math.min(tonumber(args["max-keys"]) or 1000, 1000)
  local index = start_index(keys, args, prefix)
  if not index then return s3.refuse(400, "InvalidArgument", "The continuation token is not one of ours.") end
  local text = args["encoding-type"] == "url" and url or s3.xml
  local out, prefixes, count, last = {}, {}, 0, nil
  local bound = past_prefix(keys, prefix, index)
  while index < bound and count < most do
    local key = keys[index]
    local cut = delimiter ~= "" and key:find(delimiter, #prefix + 1, true)
    if cut then
      local common = key:sub(1, cut + #delimiter - 1)
      prefixes[#prefixes + 1] = "<CommonPrefixes><Prefix>" .. text(common) .. "</Prefix></CommonPrefixes>"
      last, index = "p" .. common, past_prefix(keys, common, index)
    else
      out[#out + 1] = "<Contents><Key>" .. text(key) .. tails[index]
      last, index = "k" .. key, index + 1
    end
    count = count + 1
  end
  local truncated = index < bound and most > 0
  local head = { '<?xml version="1.0" encoding="UTF-8"?>\n<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>', name,
    "</Name><Prefix>", text(prefix), "</Prefix><MaxKeys>", most, "</MaxKeys><KeyCount>", count, "</KeyCount><IsTruncated>", tostring(truncated), "</IsTruncated>" }
  local function field(tag, value) if value then head[#head + 1] = "<" .. tag .. ">" .. value .. "</" .. tag .. ">" end end
  field("Delimiter", delimiter ~= "" and text(delimiter))
  field("EncodingType", args["encoding-type"] == "url" and "url")
  field("StartAfter", type(args["start-after"]) == "string" and text(args["start-after"]))
  field("ContinuationToken", args["continuation-token"])
  field("NextContinuationToken", truncated and ngx.encode_base64(last))
  local body = table.concat(head) .. table.concat(out) .. table.concat(prefixes) .. "</ListBucketResult>"
  ngx.header["Content-Type"] = "application/xml"
  ngx.header["Content-Length"] = #body
  ngx.print(body)
  return ngx.exit(200)
end

-- A listed key without a file has the same bytes as all others; any other key does not exist.
function s3.stand_in()
  local name, key = ngx.var.uri:match("^/([^/]+)/(.+)$")
  local keys = name and s3.buckets[name] and s3.buckets[name].keys
  if not keys or keys[lower_bound(keys, key)] ~= key then
    return s3.refuse(404, "NoSuchKey", "The specified key does not exist.")
  end
  ngx.req.set_uri("/content")
end

local function delay()
  if s3.ttfb_s <= 0 then return end
  local seconds = s3.ttfb_s
  if s3.ttfb_sigma > 0 then -- log-normal whose median is ttfb_s
    seconds = seconds * math.exp(s3.ttfb_sigma * math.sqrt(-2 * math.log(1 - math.random())) * math.cos(2 * math.pi * math.random()))
  end
  ngx.sleep(seconds)
end

-- With lists_writes, names and sizes of what was written are listed and told to a HEAD, without their bytes, which are dropped.
local sent = {} -- upload id -> bytes
local written = {} -- uri -> bytes
local function note(name, key, size)
  local bucket = s3.lists_writes and s3.buckets[name]
  if not bucket then return end
  local index = lower_bound(bucket.keys, key)
  if bucket.keys[index] == key then
    table.remove(bucket.keys, index)
    table.remove(bucket.tails, index)
  end
  written["/" .. name .. "/" .. key] = size
  if size then
    table.insert(bucket.keys, index, key)
    table.insert(bucket.tails, index, tail(size, "d41d8cd98f00b204e9800998ecf8427e"))
  end
end

local EMPTY_ETAG = '"d41d8cd98f00b204e9800998ecf8427e"'
local function accept_write(method)
  ngx.req.read_body()
  local args = ngx.req.get_uri_args()
  local bucket, key = ngx.var.uri:match("^/([^/]+)/?(.*)$")
  if method == "PUT" then
    local size = tonumber(ngx.var.http_x_amz_decoded_content_length or ngx.var.http_content_length) or 0
    if args.uploadId then sent[args.uploadId] = (sent[args.uploadId] or 0) + size else note(bucket, key, size) end
    ngx.header["ETag"] = EMPTY_ETAG
    if ngx.var.http_x_amz_copy_source then
      ngx.header["Content-Type"] = "application/xml"
      ngx.print("<CopyObjectResult><ETag>", s3.xml(EMPTY_ETAG), "</ETag><LastModified>2026-01-01T00:00:00.000Z</LastModified></CopyObjectResult>")
      return ngx.exit(200)
    end
    ngx.header["Content-Length"] = 0
    return ngx.exit(200)
  elseif method == "DELETE" then
    note(bucket, key, nil)
    return ngx.exit(204)
  end
  ngx.header["Content-Type"] = "application/xml"
  if args.uploads then
    ngx.print("<InitiateMultipartUploadResult><Bucket>", bucket, "</Bucket><Key>", s3.xml(key), "</Key><UploadId>", ngx.var.request_id, "</UploadId></InitiateMultipartUploadResult>")
  elseif args.uploadId then
    note(bucket, key, sent[args.uploadId] or 0)
    sent[args.uploadId] = nil
    ngx.print("<CompleteMultipartUploadResult><Bucket>", bucket, "</Bucket><Key>", s3.xml(key), "</Key><ETag>", s3.xml(EMPTY_ETAG), "</ETag></CompleteMultipartUploadResult>")
  else
    ngx.print("<DeleteResult/>")
  end
  return ngx.exit(200)
end

-- Every request passes here, so no table is made and no argument parsed for a plain GET.
function s3.answer()
  delay()
  if s3.error_503 > 0 and math.random() < s3.error_503 then return s3.refuse(503, "SlowDown", "Please reduce your request rate.") end
  local method = ngx.req.get_method()
  if method ~= "GET" and method ~= "HEAD" then return accept_write(method) end
  local uri = ngx.var.uri
  if method == "HEAD" and written[uri] then
    ngx.header["ETag"], ngx.header["Content-Length"] = EMPTY_ETAG, written[uri]
    ngx.header["Last-Modified"] = "Thu, 01 Jan 2026 00:00:00 GMT"
    return ngx.exit(200)
  end
  local slash = uri:find("/", 2, true) or #uri
  if slash < #uri then return end
  local bucket = uri:match("^/([^/]+)/?$") or ""
  if method == "HEAD" then return ngx.exit(s3.buckets[bucket] and 200 or 404) end
  return s3.list(bucket, ngx.req.get_uri_args())
end

return s3

-- pieces.lua: how Redis keeps the output of a run. soloist sends it between lib.lua and the scripts that add to the
-- output or read it. The same as src/store/output.rs.
--
-- The output is a hash that expires. Its fields: start (the first byte that the pieces have), base (the first byte that
-- readers get), stop (the byte after the last), done (1: no more will come). If the run ended before all of its output
-- was here, also total (the number of bytes that it wrote) and until (ms: then the rest is given up). marks says which
-- bytes came from stderr. The pieces: field p<n> has the bytes from n * PIECE on.

local function load_output(key)
  local o = redis.call('HMGET', key, 'start', 'base', 'stop', 'done', 'total', 'until')
  if not o[3] then return nil end
  return { start = tonumber(o[1]), base = tonumber(o[2]), stop = tonumber(o[3]), done = o[4] == '1',
    total = tonumber(o[5] or ''), patience = tonumber(o[6] or '') }
end

local function save_output(key, o)
  if o.total and o.stop >= o.total then o.done = true end
  redis.call('HSET', key, 'start', int(o.start), 'base', int(o.base), 'stop', int(o.stop), 'done', o.done and 1 or 0)
  if o.total then redis.call('HSET', key, 'total', int(o.total), 'until', int(o.patience)) end
  redis.call('PEXPIRE', key, OUTPUT_TTL)
end

-- Adds `data` at the end.
local function put_pieces(key, o, data)
  local pos = 1
  while pos <= #data do
    local n = math.floor(o.stop / PIECE)
    local part = string.sub(data, pos, pos + (n + 1) * PIECE - o.stop - 1)
    local name = 'p' .. int(n)
    local there = o.stop > math.max(o.start, n * PIECE) and redis.call('HGET', key, name) or ''
    redis.call('HSET', key, name, there .. part)
    o.stop, pos = o.stop + #part, pos + #part
  end
end

-- No run keeps more than PIECES_MOST pieces. If another program wrote larger numbers, the server must not count through
-- them all.
local function drop_pieces(key, from, to)
  for n = math.max(from, to - PIECES_MOST), to do redis.call('HDEL', key, 'p' .. int(n)) end
end

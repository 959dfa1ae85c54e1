(** * Masks on the image as it came, then any preparation (engine/masking.py, engine/exact.py)

    Preparation (resizing, cropping, normalising) may be any function of the masked image. Counterexamples.v shows that
    the argument breaks if masks are applied after it. *)

From Coq Require Import List Bool.
From PatchCleanser Require Import Images.

Section SourceGrid.
  Context {pixel value input answer : Type}.
  Variable fill : pixel -> value.
  Variable prepare : image pixel value -> input.
  Variable masks : list (region pixel).

  (** The network may be told which two masks these are, in either order: it may drop hidden tokens, or compute each
      union of masks in a row of the batch of its own. *)
  Variable network : nat -> nat -> input -> answer.
  Hypothesis either_order : forall i j z, network i j z = network j i z.

  (** Preparation looks at the values of pixels only. *)
  Hypothesis prepare_is_a_function : forall x x', (forall p, x p = x' p) -> prepare x = prepare x'.

  Definition fill_in (mask : region pixel) (x : image pixel value) : image pixel value :=
    fun p => if mask p then fill p else x p.

  Definition masked_then_prepared (x : image pixel value) : table answer :=
    fun i j => network i j (prepare (fill_in (union (mask masks i) (mask masks j)) x)).

  (** So every theorem about such labels holds for patches on the image as it came. *)
  Theorem masking_before_preparing_sees_visible_pixels_only : function_of_visible masks masked_then_prepared.
  Proof.
    unfold masked_then_prepared, fill_in, union. split.
    - intros x i j. rewrite either_order. f_equal. apply prepare_is_a_function. intro p. now rewrite orb_comm.
    - intros x x' i j Hsame. f_equal. apply prepare_is_a_function. intro p.
      destruct (mask masks i p) eqn:Ei, (mask masks j p) eqn:Ej; simpl; auto.
  Qed.
End SourceGrid.
